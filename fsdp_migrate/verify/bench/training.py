"""The loop that is timed: the same optimizer, data and number of steps for every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_migrate.errors import Unsupported
from fsdp_migrate.verify.bench.clocks import Peak, meter
from fsdp_migrate.verify.bench.models import Model
from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.setup import Setup

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1
MOST_EXTRA_WARMUP = 50


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's figures. `losses` start at the first warm-up step; `step_seconds` after it."""

    losses: tuple[float, ...]
    gradient_norm: float  # global, fp64, of the first step
    step_seconds: tuple[float, ...]
    peak: Peak


def train(
    model: nn.Module, whole: nn.Module, source: Model, setup: Setup, row: Row, ranks: Ranks
) -> Measured:
    """`model` is the spread model; `whole` what it was made from, which knows its vocabulary."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    batches = _batches(whole, source, setup, row, ranks)
    clock = meter(ranks.device)
    losses: list[Tensor] = []
    norm = math.nan

    def step() -> None:
        nonlocal norm
        batch = next(batches)
        clock.begin()
        loss = source.loss(model, batch)
        torch.autograd.backward(loss)
        if not losses:
            norm = gradient_norm(model, ranks)
        optimizer.step()
        optimizer.zero_grad()
        clock.end()
        losses.append(loss.detach())

    _warm_up(step, setup, row, ranks)
    clock.restart()
    for _ in range(setup.steps):
        step()
    seconds = tuple(clock.seconds())
    return Measured(tuple(float(loss) for loss in losses), norm, seconds, clock.peak())


def _warm_up(step: Callable[[], None], setup: Setup, row: Row, ranks: Ranks) -> None:
    """`setup.warmup` steps; a row that compiles goes on until no rank compiled in two steps."""
    for _ in range(setup.warmup):
        step()
    if not row.compiles:
        return
    quiet = 0
    for _ in range(MOST_EXTRA_WARMUP):
        before = _graphs()
        step()
        fresh = torch.tensor(float(_graphs() - before), device=ranks.device)
        dist.all_reduce(fresh)
        quiet = 0 if fresh.item() else quiet + 1
        if quiet == 2:
            return
    raise Unsupported(f"torch.compile still recompiles after {MOST_EXTRA_WARMUP} more steps")


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _batches(
    whole: nn.Module, source: Model, setup: Setup, row: Row, ranks: Ranks
) -> Iterator[tuple[Tensor, ...]]:
    """This rank's part of each global batch; every row cuts the same global batches."""
    rng = torch.Generator().manual_seed(setup.seed)
    share = setup.batch * row.sharing
    start = ranks.rank // row.sharing * share
    while True:
        whole_batch = source.batch(whole, setup.global_batch, setup.seq_len, rng)
        yield tuple(part[start : start + share].to(ranks.device) for part in whole_batch)


def gradient_norm(model: nn.Module, ranks: Ranks) -> float:
    """
    The global gradient norm, from fp64 sums of squares: what a loss can't show (gradients summed
    instead of averaged) it does. A gradient held by several ranks counts once.
    """
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    square = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        copies = 1 if flat else ranks.world_size
        if isinstance(grad, DTensor):
            copies = _copies(grad)
            grad = grad.to_local()
        square += grad.double().square().sum().to(ranks.device) / copies
    dist.all_reduce(square)
    return math.sqrt(square.item())


def _copies(grad: DTensor) -> int:
    held = 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
        assert not placement.is_partial(), "a gradient in .grad has been reduced"
        held *= size if placement.is_replicate() else 1
    return held
