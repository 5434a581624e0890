"""
Gradient clipping: what the script asked for and was told, and exact mode's own norm.

FSDP1 and FSDP2 add partial norms in different partitions, which moves the norm by a rounding and
everything after it. Exact mode computes the norm in fp64 from each rank's elements and rounds once,
so that both get the same bits. What a call reduces over stays as it was: plain tensors given to
torch's function are clipped by this rank's own norm, as in the script, right or wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from fsdp_migrate.verify.capture.optimizers import gradient_squares
from fsdp_migrate.verify.capture.patch import Patches
from fsdp_migrate.verify.capture.pieces import Piece
from fsdp_migrate.verify.capture.session import Session
from fsdp_migrate.verify.trial import Clip


def install(session: Session, patches: Patches) -> None:
    def torch_function(original: Any) -> Any:
        return _recorded(session, _exact_clip(session, original) if exact else original)

    exact = session.trial.exact
    patches.replace(torch.nn.utils, "clip_grad_norm_", torch_function)
    patches.replace(
        torch.nn.utils, "clip_grads_with_norm_", lambda f: _recorded_scaling(session, f)
    )
    if exact:
        patches.replace(torch.nn.utils, "get_total_norm", lambda f: _exact_total(session, f))
    method = FullyShardedDataParallel.clip_grad_norm_
    FullyShardedDataParallel.clip_grad_norm_ = _recorded(  # type: ignore[method-assign]
        session, _exact_method(session) if exact else method
    )


def _recorded(session: Session, clip: Any) -> Any:
    @functools.wraps(clip)
    def recorded(target: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        if session.clipping:  # FSDP1's method calls torch's function under NO_SHARD
            return clip(target, max_norm, *args, **kwargs)
        record_unclipped(session)
        with session.clip():
            norm = clip(target, max_norm, *args, **kwargs)
        value = norm.full_tensor() if isinstance(norm, DTensor) else norm
        session.step.clips.append(Clip(float(max_norm), float(value)))
        return norm

    return recorded


def _recorded_scaling(session: Session, clip: Any) -> Any:
    """The second half of a clip that the script makes in two calls."""

    @functools.wraps(clip)
    def recorded(
        target: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        held = [target] if isinstance(target, torch.Tensor) else list(target)
        if session.clipping:  # torch's own clip_grad_norm_ calls this, and is recorded itself
            clip(held, max_norm, total_norm, *args, **kwargs)
            return
        record_unclipped(session)
        clip(held, max_norm, total_norm, *args, **kwargs)
        norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
        session.step.clips.append(Clip(float(max_norm), float(norm)))

    return recorded


def record_unclipped(session: Session) -> None:
    """Gradients as the first clip of step 0 finds them: a clip hides any factor on them."""
    if session.stepped == 0 and not session.step.clips:
        session.step.raw = gradient_squares(session, session.loss_scale)


def _exact_method(session: Session) -> Any:
    """FSDP1's method: the norm over the whole model, sharded and replicated parameters alike."""

    @torch.no_grad()
    def clip_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        inside = {id(p) for p in self.parameters()}
        for handle in self._all_handles:
            inside |= {id(handle.flat_param), *map(id, handle.flat_param._params or ())}
        amount, seen = 0.0, set()
        for piece in session.models.pieces:
            grad = piece.carrier.grad
            if id(piece.carrier) in inside and grad is not None and piece.count:
                run = piece.run_of(grad)
                if run is None:
                    raise RuntimeError(f"the gradient of {piece.name} is not sharded at the clip")
                amount = _join(amount, _power(run, norm_type) / _copies(piece), norm_type)
                seen.add(piece.carrier)
        total = _finish(_over_ranks(amount, norm_type, None), norm_type)
        session.exact_clips += 1
        grads = [carrier.grad for carrier in seen if carrier.grad is not None]
        return _scale(grads, max_norm, torch.tensor(total, device=self.compute_device))

    return clip_grad_norm_


def _copies(piece: Piece) -> int:
    """How many ranks hold these very elements."""
    shards, _, parallel = piece.degrees
    if piece.kind == "plain":
        return dist.get_world_size()
    held = shards * (parallel if piece.block.numel != math.prod(piece.block.shape) else 1)
    return dist.get_world_size() // held


def _exact_clip(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    @torch.no_grad()
    def clip_grad_norm_(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads = [p.grad for p in held if p.grad is not None]
        if not _uniform(grads):
            result: torch.Tensor = original(held, max_norm, norm_type, *args, **kwargs)
            return result
        total = _total(session, grads, float(norm_type))
        _scale(grads, max_norm, total.to_local() if isinstance(total, DTensor) else total)
        return total

    return clip_grad_norm_


def _exact_total(session: Session, original: Any) -> Any:
    @functools.wraps(original)
    @torch.no_grad()
    def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        held = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not _uniform(held):
            return original(held, norm_type, *args, **kwargs)
        return _total(session, held, float(norm_type))

    return get_total_norm


def _uniform(grads: list[torch.Tensor]) -> bool:
    """All plain, or all DTensors of one mesh: anything else torch itself must judge."""
    meshes = {grad.device_mesh if isinstance(grad, DTensor) else None for grad in grads}
    return len(meshes) == 1


def _total(session: Session, grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    session.exact_clips += 1
    amount = 0.0
    for grad in grads:
        if isinstance(grad, DTensor):
            copies = math.prod(
                grad.device_mesh.size(dim)
                for dim, placement in enumerate(grad.placements)
                if isinstance(placement, Replicate)
            )
            share = _power(grad.to_local().detach(), norm_type) / copies
        else:
            share = _power(grad, norm_type)
        amount = _join(amount, share, norm_type)
    first = grads[0]
    if not isinstance(first, DTensor):
        return torch.tensor(_finish(amount, norm_type), device=first.device)
    mesh = first.device_mesh
    total = torch.tensor(
        _finish(_over_ranks(amount, norm_type, mesh), norm_type), device=first.to_local().device
    )
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _power(run: torch.Tensor, norm_type: float) -> float:
    norm = (
        float(torch.linalg.vector_norm(run, norm_type, dtype=torch.float64)) if run.numel() else 0.0
    )
    return norm if math.isinf(norm_type) else norm**norm_type


def _join(one: float, other: float, norm_type: float) -> float:
    return max(one, other) if math.isinf(norm_type) else one + other


def _finish(amount: float, norm_type: float) -> float:
    return amount if math.isinf(norm_type) else amount ** (1.0 / norm_type)


def _over_ranks(amount: float, norm_type: float, mesh: Any) -> float:
    """Joined over the ranks of a mesh (None: all), in rank order, by every rank alike."""
    parts: list[Any] = [(dist.get_rank(), amount)]
    groups = [None] if mesh is None else mesh.get_all_groups()
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, parts, group=group)
        parts = sorted({rank: item for part in gathered for rank, item in part}.items())
    return functools.reduce(
        lambda one, other: _join(one, other, norm_type), (v for _, v in parts), 0.0
    )


def _scale(grads: Iterable[torch.Tensor], max_norm: float, total: torch.Tensor) -> torch.Tensor:
    """As torch does it: a coefficient in the norm's precision, cast to each gradient's."""
    total = total.to(torch.float32)
    coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for grad in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.detach().mul_(coefficient.to(local.device, local.dtype))
    return total
