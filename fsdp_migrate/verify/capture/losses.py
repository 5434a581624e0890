"""
Losses, where every training loop must pass: the outermost backward.

`Tensor.backward` calls `torch.autograd.backward` by attribute, so one replacement sees plain loops,
accelerate, Fabric and the Trainer. A loss that a GradScaler scaled is recorded as it was before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fsdp_migrate.verify.capture.optimizers import gradient_squares
from fsdp_migrate.verify.capture.session import Session

_UNSCALED = "_fsdp_migrate_unscaled"


def install(session: Session) -> None:
    run = torch.autograd.backward

    @functools.wraps(run)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if session.backwards == 0:
            session.reach()
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                _record(session, tensor)
        session.backwards += 1
        try:
            run(tensors, *args, **kwargs)
        finally:
            session.backwards -= 1
        if session.backwards == 0 and session.stepped == 0:
            session.step.raw = gradient_squares(session, session.loss_scale)

    torch.autograd.backward = backward
    _watch_scalers(session)


def _record(session: Session, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        return
    unscaled, scale = getattr(tensor, _UNSCALED, (tensor, 1.0))
    session.step.scale = session.loss_scale = scale
    value = unscaled.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    session.step.losses.append(float(value))


def _watch_scalers(session: Session) -> None:
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for scaler in (GradScaler, ShardedGradScaler):
        if "scale" in vars(scaler):
            scaler.scale = _marking(scaler.scale)  # type: ignore[method-assign]
        if "unscale_" in vars(scaler):
            scaler.unscale_ = _unscaling(session, scaler.unscale_)  # type: ignore[method-assign]


def _unscaling(session: Session, unscale: Any) -> Any:
    @functools.wraps(unscale)
    def unscaled(self: Any, optimizer: Any) -> Any:
        result = unscale(self, optimizer)
        session.loss_scale = 1.0
        return result

    return unscaled


def _marking(scale: Any) -> Any:
    @functools.wraps(scale)
    def marked(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled() and isinstance(outputs, torch.Tensor):
            setattr(scaled, _UNSCALED, (outputs.detach(), float(self.get_scale())))
        return scaled

    return marked
