"""
The control: what a rounding, and nothing else, does to a training run.

Gradients are summed over ranks in another order at each call (`collectives`), and each element is
then moved by at most one unit in the last place of the precision that gradients are reduced in. The
drift this causes is the envelope in which two correct runs may differ.
"""

from __future__ import annotations

import zlib

import torch

from fsdp_migrate.verify.capture.pieces import local_of
from fsdp_migrate.verify.capture.session import Session


def nudge(session: Session, optimizer: torch.optim.Optimizer, seed: int) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for piece in session.models.pieces:
        grad = piece.carrier.grad
        if grad is None or id(piece.carrier) not in held or not piece.count:
            continue
        local = local_of(grad).detach()
        offset = piece.offset or 0
        run = local.reshape(-1)[offset : offset + piece.count]
        # Replicas must be moved alike: the seed is the element range, not the rank.
        key = f"{seed} {session.stepped} {piece.name} {piece.extent}"
        source = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        step = torch.randint(-1, 2, (run.numel(),), generator=source).to(run.device, run.dtype)
        run.mul_(1 + step * torch.finfo(_noise(piece.reduce_dtype, run.dtype)).eps)


def _noise(reduced: torch.dtype, stored: torch.dtype) -> torch.dtype:
    return reduced if torch.finfo(reduced).eps > torch.finfo(stored).eps else stored
