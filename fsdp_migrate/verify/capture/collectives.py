"""
Exact mode: gradient reductions as rank-ordered sums.

A backend adds the ranks' values in an order that depends on where an element lies in the buffer,
and FSDP1 and FSDP2 lay their buffers out differently. Here every element is gathered and added in
rank order, so equal gradients give equal bits. Calls are counted: torch has renamed these functions
before, and a replacement that nobody calls proves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from fsdp_migrate.verify.capture.patch import Patches
from fsdp_migrate.verify.capture.session import Session

_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_REDUCE_SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")
_GATHER = ("all_gather_single", "all_gather_into_tensor")


def install(session: Session, patches: Patches) -> None:
    gather = next(getattr(dist, name) for name in _GATHER if hasattr(dist, name))

    def rows(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        size = dist.get_world_size(group)
        everyone = tensor.new_empty(size * tensor.numel())
        gather(everyone, tensor.contiguous().view(-1), group=group)
        return everyone.view(size, -1)

    def order(ranks: torch.Tensor) -> torch.Tensor:
        """Rank order; in a control another one at each call, as a backend's may be."""
        if session.trial.nudge is None:
            return ranks
        return ranks.roll(session.exact_calls + session.trial.nudge, 0)

    def reduce_scatter(original: Any) -> Any:
        def exact(
            output: torch.Tensor,
            input: torch.Tensor,  # noqa: A002  torch's own name, may be passed by keyword
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if op not in _SUMS:
                return original(output, input, op=op, group=group, async_op=async_op)
            session.exact_calls += 1
            mine, size = dist.get_rank(group), output.numel()
            part = rows(input, group)[:, mine * size : (mine + 1) * size]
            output.copy_(_added(order(part), op).view_as(output))
            return _Done() if async_op else None

        return exact

    def all_reduce(original: Any) -> Any:
        def exact(
            tensor: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if op not in _SUMS or isinstance(tensor, DTensor) or not tensor.is_floating_point():
                return original(tensor, op=op, group=group, async_op=async_op)
            session.exact_calls += 1
            tensor.copy_(_added(order(rows(tensor, group)), op).view_as(tensor))
            return _Done() if async_op else None

        return exact

    for owner in (dist, distributed_c10d):
        for name in _REDUCE_SCATTER:
            patches.replace(owner, name, reduce_scatter)
        patches.replace(owner, "all_reduce", all_reduce)


def _added(rows: torch.Tensor, op: Any) -> torch.Tensor:
    """Rank 0 + rank 1 + ..., in the tensor's own precision; then the average, as backends do it."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    if op == dist.ReduceOp.AVG:
        total /= len(rows)
    return total


class _Done:
    """The handle of a collective that is already over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
