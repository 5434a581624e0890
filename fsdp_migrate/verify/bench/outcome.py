"""What became of a row, and how it stands against its reference. Plain data and arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.setup import Setup

# Relative differences that rounding explains. Correct pairs stay well below (measured on a small
# Llama: loss 5e-8 and 2e-5, norm 7e-9 and 1e-4 in fp32 and bf16); a lost average, a frozen part
# that trains or a shard that is not reduced is far above.
LOSS_NOISE = {"fp32": 1e-5, "bf16": 2e-3}
NORM_NOISE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes are of the rank that used most; seconds are of the slowest rank, step by step."""

    device: str
    tokens_per_second: float  # per rank
    step_median: float
    step_quartiles: tuple[float, float]
    peak_allocated: int | None
    peak_reserved: int | None
    host_rss: int | None
    flops_per_token: float | None
    flops_reason: str | None
    losses: tuple[tuple[float, ...], ...]  # [rank][step], warm-up included
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status` is ran, cannot run, out of memory, timed out or failed; `reason` says why not."""

    row: Row
    status: str
    reason: str = ""
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """Relative differences to the reference row: the largest loss's, the first gradient norm's."""

    bitwise: bool
    loss: float
    gradient_norm: float
    holds: bool


def figures(records: Sequence[dict[str, Any]], setup: Setup) -> Figures:
    slowest = [max(times) for times in zip(*(r["step_seconds"] for r in records), strict=True)]
    median = statistics.median(slowest)
    quarters = statistics.quantiles(slowest, n=4, method="inclusive") if len(slowest) > 1 else None
    peaks = {key: [r["peak"][key] for r in records] for key in records[0]["peak"]}
    most = {key: None if None in values else max(values) for key, values in peaks.items()}
    return Figures(
        device=records[0]["device"],
        tokens_per_second=setup.tokens_per_step / setup.ranks / median,
        step_median=median,
        step_quartiles=(quarters[0], quarters[2]) if quarters else (median, median),
        peak_allocated=most["allocated"],
        peak_reserved=most["reserved"],
        host_rss=most["host_rss"],
        flops_per_token=records[0]["flops_per_token"],
        flops_reason=records[0]["flops_reason"],
        losses=tuple(tuple(r["losses"]) for r in records),
        gradient_norm=records[0]["gradient_norm"],
    )


def parity(mine: Figures, reference: Figures, dtype: str) -> Parity:
    """
    Rows may have run different numbers of warm-up steps: the steps both ran are compared. The
    losses of a row whose ranks share data are other averages, so means over ranks are compared.
    """
    pairs = list(zip(_means(mine), _means(reference), strict=False))
    loss = max(_relative(a, b) for a, b in pairs)
    norm = _relative(mine.gradient_norm, reference.gradient_norm)
    steps = len(pairs)
    same = all(a[:steps] == b[:steps] for a, b in zip(mine.losses, reference.losses, strict=True))
    holds = loss <= LOSS_NOISE[dtype] and norm <= NORM_NOISE[dtype]
    return Parity(bitwise=same, loss=loss, gradient_norm=norm, holds=holds)


def _means(figures: Figures) -> list[float]:
    return [math.fsum(step) / len(step) for step in zip(*figures.losses, strict=True)]


def _relative(a: float, b: float) -> float:
    """Infinite where either is not a number: what cannot be compared must not look equal."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))
