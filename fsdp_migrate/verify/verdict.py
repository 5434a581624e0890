"""
What verify says: plain data.

    PASS (bitwise)        exact mode gave equal bits, in every precision that was run
    PASS (within noise)   the drift is inside what a rounding does to the first run
    FAIL                  the runs differ; where first, and how
    INCONCLUSIVE          the runs prove nothing about the migration; why
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fsdp_migrate.verify.trial import Trace


class Kind(Enum):
    """The value is the exit code."""

    PASS = 0
    FAIL = 1
    INCONCLUSIVE = 5


@dataclass(frozen=True)
class Finding:
    """The first thing that keeps a check from passing."""

    message: str
    kind: Kind = Kind.FAIL
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    factor: str | None = None  # a ratio that means something: "gradients are summed"


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    title: str  # "PASS (bitwise)"
    message: str  # one sentence
    check: str | None = None  # the check that failed
    finding: Finding | None = None

    @property
    def sentence(self) -> str:
        """The last line on the terminal."""
        if self.kind is Kind.PASS:
            return f"{self.title}: {self.message}"
        return f"{self.title} ({self.message})"


@dataclass(frozen=True)
class Pair:
    """One trial of each script, run alike."""

    name: str  # exact, exact-fp32, native
    before: Trace
    after: Trace
    exact: bool
    fp32: bool  # fp32 because the script is, or because it was lifted
    controls: tuple[Trace, ...] = ()  # the first script again, with rounding noise


@dataclass(frozen=True)
class Point:
    """One step of one pair, as a person reads it."""

    step: int
    before: float
    after: float
    difference: float  # relative, the largest over ranks and micro-batches
    envelope: float | None  # allowed difference, where measured
    norm_before: float | None  # at the optimizer: clipped, where the script clips
    norm_after: float | None
    seconds_before: float | None
    seconds_after: float | None
    rates: tuple[float, ...] = ()
    unclipped_before: float | None = None  # as clip_grad_norm_ told the script
    unclipped_after: float | None = None


@dataclass(frozen=True)
class Series:
    """All steps of one pair; memory in bytes, the largest over ranks."""

    name: str
    points: tuple[Point, ...]
    peak_before: int
    peak_after: int
    device: str = ""  # cpu: peaks are of host memory; cuda: of the allocator


@dataclass(frozen=True)
class Parity:
    """Everything verify found out."""

    verdict: Verdict
    passed: tuple[str, ...]  # checks that passed, in order
    series: tuple[Series, ...]
    notes: tuple[str, ...]  # what limits the proof
    redirections: tuple[str, ...]  # CUDA calls that ran on the CPU
    facts: dict[str, Any] = field(default_factory=dict)
