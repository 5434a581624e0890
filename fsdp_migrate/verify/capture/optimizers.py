"""
Optimizer steps, through torch's global step hooks: they survive schedulers and engine wrappers.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_migrate.verify.capture import rounding
from fsdp_migrate.verify.capture.session import Session
from fsdp_migrate.verify.trial import Optimizer

# How a step is carried out, not what it computes.
IMPLEMENTATION = {"params", "foreach", "fused", "capturable", "differentiable", "param_names"}


def install(session: Session) -> None:
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _builds_state():
            return
        if not session.models.roots and not session.optimizers:
            session.without_fsdp()
        if not any(optimizer is known for known in session.optimizers):
            session.optimizers.append(optimizer)
            session.recorder.emit("optimizer", **vars(_describe(session, optimizer)))
        if optimizer is session.optimizers[0]:
            session.close_step()
        session.step.final.update(gradient_squares(session, 1.0, optimizer))
        session.step.rates.append(tuple(float(g.get("lr", 0.0)) for g in optimizer.param_groups))
        if session.trial.nudge is not None:
            rounding.nudge(session, optimizer, session.trial.nudge)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _builds_state():
            return
        session.step.counts.append(_step_counts(optimizer))
        session.optimizer_stepped(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _builds_state() -> bool:
    """torch's state-dict functions step once with zero gradients, to make state to load into."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back
    return False


def gradient_squares(
    session: Session, scale: float, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, float | None]:
    """
    Sum of squares of this rank's part of each gradient, in fp64, a GradScaler's `scale` undone.

    None where there is no gradient, or one that is not yet reduced (FSDP1's `no_sync`). With an
    optimizer only its own parameters are told.
    """
    held = None
    if optimizer is not None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names, squares = [], []
    found: dict[str, float | None] = {}
    for piece in session.models.pieces:
        if not piece.carrier.requires_grad or (held is not None and id(piece.carrier) not in held):
            continue
        grad = piece.carrier.grad
        run = None if grad is None else piece.run_of(grad)
        if run is None or not piece.count:
            found[piece.name] = None if piece.count else 0.0
            continue
        names.append(piece.name)
        squares.append(torch.linalg.vector_norm(run, dtype=torch.float64))
    if squares:
        norms = torch.stack([norm.to(squares[0].device) for norm in squares]).tolist()
        for name, norm in zip(names, norms, strict=True):
            found[name] = (norm / scale) ** 2 if math.isfinite(norm) else math.nan
    return found


def _describe(session: Session, optimizer: torch.optim.Optimizer) -> Optimizer:
    pieces: dict[int, list[Any]] = {}
    for piece in session.models.pieces:
        pieces.setdefault(id(piece.carrier), []).append(piece)
    options: dict[str, dict[str, Any]] = {}
    strangers = 0
    for group in optimizer.param_groups:
        mine = {key: _option(value) for key, value in group.items() if key not in IMPLEMENTATION}
        for param in group["params"]:
            strangers += id(param) not in pieces
            options.update({piece.name: mine for piece in pieces.get(id(param), [])})
    return Optimizer(
        kind=type(optimizer).__name__,
        groups=len(optimizer.param_groups),
        tensors=sum(len(group["params"]) for group in optimizer.param_groups),
        strangers=strangers,
        hyperparameters=options,
        state=session.state_of(optimizer),
        shared_state=tuple(_shared(optimizer, pieces)),
    )


def _option(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return [_option(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(type(value))


def _shared(optimizer: torch.optim.Optimizer, pieces: dict[int, list[Any]]) -> list[str]:
    """State tensors that several parameters share: a resume that kept FSDP1's aliases."""
    users: dict[tuple[str, int], list[str]] = {}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel():
                local = value.to_local() if hasattr(value, "to_local") else value
                if local.numel():
                    names = [piece.name for piece in pieces.get(id(param), [])]
                    users.setdefault((key, local.data_ptr()), []).append(names[0] if names else "?")
    return [f"{key} of {', '.join(names)}" for (key, _), names in users.items() if len(names) > 1]


def _step_counts(optimizer: torch.optim.Optimizer) -> str:
    """The distinct values of the optimizer's own step counters."""
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    values = {float(step) for step in steps}
    return ", ".join(f"{value:g}" for value in sorted(values))
