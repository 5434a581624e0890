"""
Both scripts, run alike: which trials are made, and which are compared with which.

One launch a script. Exact mode comes first (its verdict is binary), once in the script's own
precision and, where that is lower, once in fp32; then native mode with its controls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_migrate.errors import SourceError
from fsdp_migrate.verify.checks import mechanism, start
from fsdp_migrate.verify.judge import judge
from fsdp_migrate.verify.launchers import Launcher
from fsdp_migrate.verify.processes import last_lines
from fsdp_migrate.verify.traces import read_trace
from fsdp_migrate.verify.trial import Job, RankTrace, Trace, Trial
from fsdp_migrate.verify.verdict import Finding, Kind, Pair, Parity, Verdict

MODES = ("exact", "native")
SIDES = ("before", "after")
CONTROLS = 2
# What the other ranks say when one has gone, the most telling last.
PEER_LOST = (
    "another rank",
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "no progress for",
)
Progress = Callable[[str, str, int], None]  # side, trial, steps made so far


@dataclass(frozen=True)
class Side:
    """A script and its arguments."""

    script: Path
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """What `verify` was asked for. `folder` holds everything it leaves behind."""

    before: Side
    after: Side
    folder: Path
    steps: int = 20
    seed: int = 1234
    device: str = "auto"
    modes: tuple[str, ...] = MODES
    same_init: bool = False
    nproc_per_node: int = 2
    nnodes: int = 1
    timeout: float = 300.0

    def jobs(self) -> tuple[Job, Job]:
        """The launch of the first script and that of the second."""
        return self._job("before", self.before), self._job("after", self.after)

    def _job(self, name: str, side: Side) -> Job:
        first = name == "before"
        base = Trial("", side.script, side.args, self.steps, self.seed, self.device)
        trials = []
        for trial in self._trials(base, controls=first and "native" in self.modes):
            if self.same_init and first and trial.nudge is None:
                trial = replace(trial, keep_start=True)
            elif self.same_init:
                counterpart = trial.name.partition("-control")[0]
                trial = replace(trial, start_from=self.folder / "before" / counterpart)
            trials.append(trial)
        return Job(
            self.folder / name, tuple(trials), self.nproc_per_node, self.nnodes, self.timeout
        )

    def _trials(self, base: Trial, *, controls: bool) -> Iterator[Trial]:
        exact = "exact" in self.modes
        own = replace(base, name="exact" if exact else "native", exact=exact)
        yield own
        if exact and "native" in self.modes:
            yield replace(base, name="native")
        lifted = replace(own, name="fp32", fp32=True, unless_fp32=own.name)
        yield lifted
        if controls:
            for seed in range(1, CONTROLS + 1):
                yield replace(base, name=f"native-control{seed}", nudge=seed)
            yield replace(lifted, name="fp32-control1", nudge=1)


def run(experiment: Experiment, launcher: Launcher, progress: Progress | None = None) -> Parity:
    """
    Run both scripts and judge them.

    Raises SourceError when the first script cannot be run to compare with: what the second one is
    worth cannot be said then. A second script that fails is the verdict's business.
    """
    traces = []
    for name, job in zip(SIDES, experiment.jobs(), strict=True):
        found = launch(name, job, launcher, progress)
        if name == "before":
            usable(found)
        traces.append(found)
    return compare(traces[0], traces[1])


def launch(
    name: str, job: Job, launcher: Launcher, progress: Progress | None = None
) -> dict[str, Trace]:
    """Run a job's trials; their traces by name, those left out excluded."""
    job.folder.mkdir(parents=True, exist_ok=True)
    job.write()
    with _Follower(name, job, progress):
        launcher.run(job)
    traces = {trial.name: read_trace(job, trial) for trial in job.trials}
    return {name: trace for name, trace in traces.items() if not trace.skipped}


def compare(before: dict[str, Trace], after: dict[str, Trace]) -> Parity:
    """Judge the traces of both scripts, whatever became of the second."""
    notes = []
    for trace in after.values():
        if trace.failures:
            if trace.trial == "fp32":
                notes.append(f"no fp32 pass: {describe(trace, 'second')}")
                continue
            return _failed(before.get(trace.trial), trace)
    if (lifted := before.get("fp32")) and lifted.failures:
        notes.append(f"no fp32 pass: {describe(lifted, 'first')}")
    parity = judge(list(pairs(before, after)))
    return replace(parity, notes=(*notes, *parity.notes))


def _failed(before: Trace | None, after: Trace) -> Parity:
    """The second script failed: a migration that does not run; its set-up may tell why."""
    message = describe(after, "second")
    finding = Finding(message, step=after.steps, rank=culprit(after).rank)
    check = "run"
    if before is not None and before.ranks[0].model and after.ranks[0].model:
        pair = Pair(after.trial, before, after, exact=False, fp32=False)
        for name, look in (("mechanism", mechanism.set_up), ("start", _start)):
            if cause := look(pair):
                check, finding = name, replace(cause, message=f"{cause.message}; {message}")
                break
    return Parity(
        Verdict(finding.kind, finding.kind.name, finding.message, check, finding), (), (), (), ()
    )


def _start(pair: Pair) -> Finding | None:
    """Where every rank of a failed run got as far as its first step, its start can be judged."""
    ready = all(rank.model and rank.optimizers for rank in pair.after.ranks)
    finding = start.check(pair) if ready and pair.before.ranks[0].optimizers else None
    return finding if finding and finding.kind is Kind.FAIL else None


def pairs(before: dict[str, Trace], after: dict[str, Trace]) -> Iterator[Pair]:
    """The comparisons that the traces allow, in the order they are judged."""
    low = "fp32" in before  # the rank left it out where the script is fp32 anyway
    for name in ("exact", "fp32", "native"):
        one, other = before.get(name), after.get(name)
        if one is None or other is None or one.failures or other.failures:
            continue
        kind = "fp32" if name == "fp32" else "native"
        controls = tuple(
            trace
            for key, trace in before.items()
            if key.startswith(f"{kind}-control") and not trace.failures
        )
        exact = name == "exact" or (name == "fp32" and "exact" in before)
        yield Pair(name, one, other, exact, name == "fp32" or not low, controls)


def usable(traces: dict[str, Trace]) -> None:
    """Raises SourceError when the first script's runs are nothing to compare with."""
    for trace in traces.values():
        if trace.failures and not trace.trial.startswith("fp32"):
            raise SourceError(describe(trace, "first"))


def culprit(trace: Trace) -> RankTrace:
    """
    The rank that failed by itself, not because another had.

    In a hang no rank fails by itself: each waits for the one that is furthest behind.
    """
    alone = [rank for rank in trace.failures if not _suffered(rank)]
    return alone[0] if alone else min(trace.failures, key=lambda rank: len(rank.steps))


def _suffered(rank: RankTrace) -> int:
    """How much a rank's failure speaks of others: 0 for one of its own."""
    found = (len(PEER_LOST) - i for i, text in enumerate(PEER_LOST) if text in str(rank.failure))
    return next(found, 0)


def describe(trace: Trace, which: str) -> str:
    """What became of a failed run, with the rank's last lines and where its log is."""
    rank = culprit(trace)
    # A rank that was ended because another had noticed the hang first has nothing to say of it.
    told = rank if not _suffered(rank) else min(trace.failures, key=_suffered)
    log = trace.folder / f"rank{rank.rank}.log"
    return (
        f"the {which} run failed ({trace.trial}): rank {rank.rank}, after {len(rank.steps)} "
        f"optimizer steps: {told.failure}; log: {log}\n{last_lines(log)}"
    )


class _Follower:
    """Tells how far the trials are, from the lines that rank 0 writes."""

    def __init__(self, name: str, job: Job, progress: Progress | None) -> None:
        self._name, self._job, self._progress = name, job, progress
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        if self._progress:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._progress:
            self._thread.join()

    def _follow(self) -> None:
        assert self._progress is not None
        told: dict[str, int] = {}
        last = False
        while not last:
            last = self._done.wait(0.5)
            for trial in self._job.trials:
                made = _steps(self._job.folder / trial.name / "rank0.jsonl")
                if made is not None and told.get(trial.name) != made:
                    told[trial.name] = made
                    self._progress(self._name, trial.name, made)


def _steps(lines: Path) -> int | None:
    if not lines.exists():
        return None
    return lines.read_text(errors="replace").count('{"event": "step"')
