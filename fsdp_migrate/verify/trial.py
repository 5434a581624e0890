"""
What is run, and what a run left behind: plain data, no torch.

A Trial is one run of one script under capture. A Job is the trials that one launch of ranks makes,
one after another, so that ranks are started once. Every rank writes JSON lines; a Trace is those
lines of all ranks, read back. Floats travel as `float.hex`, so nothing is rounded on the way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Trial:
    """One run of one script under capture."""

    name: str  # unique in its job; also the name of its folder
    script: Path
    args: tuple[str, ...] = ()
    steps: int = 20
    seed: int = 1234
    device: str = "auto"  # auto, cpu or cuda
    exact: bool = False  # rank-ordered sums and an fp64 clip norm
    fp32: bool = False  # every lower precision the script asks for is lifted to fp32
    nudge: int | None = None  # a control: gradients moved by a rounding, from this seed
    keep_start: bool = False  # write the initial weights for a later `start_from`
    start_from: Path | None = None  # folder of the trial whose initial weights are replayed
    unless_fp32: str | None = None  # leave out when that trial already ran in fp32


@dataclass(frozen=True)
class Job:
    """Trials that one launch makes, in order. `folder` must be seen by every node."""

    folder: Path
    trials: tuple[Trial, ...]
    nproc_per_node: int = 2
    nnodes: int = 1
    timeout: float = 300.0  # seconds a rank may go without a sign of progress

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def file(self) -> Path:
        return self.folder / "job.json"

    @property
    def started(self) -> Path:
        """A file that a rank makes when it starts."""
        return self.folder / "started"

    def write(self) -> None:
        """Make the folders and the job file that every rank reads."""
        for trial in self.trials:
            (self.folder / trial.name / "scratch").mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".partial")  # another node may be waiting for the file
        beside.write_text(json.dumps(dataclasses.asdict(self), default=str, indent=1))
        beside.rename(self.file)

    @classmethod
    def read(cls, file: Path) -> Job:
        raw = json.loads(file.read_text())
        trials = tuple(_trial(entry) for entry in raw.pop("trials"))
        return cls(**{**raw, "folder": Path(raw["folder"])}, trials=trials)


def _trial(raw: dict[str, Any]) -> Trial:
    start_from = raw["start_from"] and Path(raw["start_from"])
    paths = {"script": Path(raw["script"]), "start_from": start_from}
    return Trial(**{**raw, **paths, "args": tuple(raw["args"])})


@dataclass(frozen=True)
class Part:
    """What one rank holds of one tensor, reduced to numbers that add up over ranks."""

    extent: str  # which elements; ranks with the same extent hold replicas
    numel: int
    bits: int  # sum over elements of hash(position, bits), modulo 2**64
    squares: float  # sum of squares, fp64
    sketch: tuple[float, ...]  # sums under pseudo-random signs: differences of tensors survive


@dataclass(frozen=True)
class Parameter:
    """A parameter as the script's first forward found it, on one rank."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    kind: str  # fsdp1, fsdp2 (DTensor under an FSDPModule), dtensor, plain
    layout: str  # for people: strategy or placements, and mesh
    degrees: tuple[int, int, int]  # shards, replicas, tensor parallel
    reduce_dtype: str
    compute_dtype: str
    extent: str
    part: Part | None  # None where this rank holds no element


@dataclass(frozen=True)
class Model:
    """A rank's record of the models, taken at each one's first forward."""

    units: Mapping[str, int]  # modules by kind: fsdp1, fsdp2, ddp, compiled
    params: Mapping[str, Parameter]
    buffers: Mapping[str, Mapping[str, Any]]
    ties: tuple[tuple[str, ...], ...]  # names that share one parameter


@dataclass(frozen=True)
class Optimizer:
    """One optimizer as its first step found it, on one rank."""

    kind: str
    groups: int
    tensors: int
    strangers: int  # parameters that belong to no model that ran forward
    hyperparameters: Mapping[str, Mapping[str, Any]]  # parameter name -> options of its group
    state: Mapping[str, Mapping[str, Any]]  # parameter name -> state key -> Part or a number
    shared_state: tuple[str, ...]  # "step of a, b": one tensor serving several parameters


@dataclass(frozen=True)
class Clip:
    """One call of clip_grad_norm_."""

    limit: float
    norm: float  # what the script was told


@dataclass(frozen=True)
class Step:
    """One optimizer step on one rank; `raw` and `final` are squares of gradients by name."""

    losses: tuple[float, ...] = ()  # one a micro-batch, GradScaler undone
    inputs: tuple[str, ...] = ()  # one a root forward
    random: tuple[str, ...] = ()  # random state at each root forward
    raw: Mapping[str, float | None] = field(default_factory=dict)  # after the last backward
    final: Mapping[str, float | None] = field(default_factory=dict)  # as the optimizer sees them
    clips: tuple[Clip, ...] = ()
    rates: tuple[tuple[float, ...], ...] = ()  # by optimizer, by group
    counts: tuple[str, ...] = ()  # distinct values of the optimizers' own step counters
    scale: float = 1.0
    seconds: float | None = None
    peak: int = 0  # bytes


@dataclass(frozen=True)
class Final:
    """What the last step left, on one rank."""

    params: Mapping[str, Part]
    buffers: Mapping[str, Mapping[str, Any]]
    state: tuple[Mapping[str, Mapping[str, Any]], ...]  # by optimizer


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. `end` is None when it never got to say."""

    rank: int
    model: Model | None = None
    optimizers: tuple[Optimizer, ...] = ()
    steps: tuple[Step, ...] = ()
    final: Final | None = None
    end: str | None = None  # steps, script
    exact_calls: int = 0
    exact_clips: int = 0
    device: str = ""
    notes: tuple[str, ...] = ()  # what was redirected or could not be seen
    failure: str | None = None  # why this rank did not finish


@dataclass(frozen=True)
class Trace:
    """One trial, all ranks."""

    trial: str
    folder: Path
    ranks: tuple[RankTrace, ...]
    skipped: bool = False

    @property
    def steps(self) -> int:
        return min((len(rank.steps) for rank in self.ranks), default=0)

    @property
    def failures(self) -> tuple[RankTrace, ...]:
        return tuple(rank for rank in self.ranks if rank.failure)
