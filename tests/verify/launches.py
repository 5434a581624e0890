"""
Launches shared by the tests: ranks are started once for many trials.

A Bench collects the runs that a test module wants, makes them in one launch of torchrun, and hands
out traces by label, so that a planted bug costs its own run and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_migrate.verify.experiment import Experiment, Side, compare
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.traces import read_trace
from fsdp_migrate.verify.trial import Job, Trace, Trial
from fsdp_migrate.verify.verdict import Parity

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Run:
    """One script, run in the given modes under a label."""

    label: str
    script: Path
    args: tuple[str, ...] = ()
    first: bool = False  # a baseline: with controls
    modes: tuple[str, ...] = ("exact",)
    steps: int = 4
    lifted: bool = True  # once more in fp32, where the script is not

    def trials(self, folder: Path) -> list[Trial]:
        side = Side(self.script, self.args)
        experiment = Experiment(side, side, folder, self.steps, modes=self.modes)
        trials = experiment.jobs()[0 if self.first else 1].trials
        return [trial for trial in trials if self.lifted or not trial.fp32]


class Bench:
    def __init__(
        self, folder: Path, runs: Iterable[Run], ranks: int = 2, timeout: float = 120
    ) -> None:
        self.folder = folder
        self._runs = {run.label: run for run in runs}
        trials = [
            replace(trial, name=f"{label}.{trial.name}", unless_fp32=_under(label, trial))
            for label, run in self._runs.items()
            for trial in run.trials(folder)
        ]
        self.job = Job(folder, tuple(trials), nproc_per_node=ranks, timeout=timeout)
        self.job.write()
        Torchrun().run(self.job)

    def traces(self, label: str) -> dict[str, Trace]:
        found = {}
        for trial in self.job.trials:
            run, _, name = trial.name.rpartition(".")
            if run == label and not (trace := read_trace(self.job, trial)).skipped:
                found[name] = replace(trace, trial=name)
        return found

    def parity(self, before: str, after: str) -> Parity:
        return compare(self.traces(before), self.traces(after))


def _under(label: str, trial: Trial) -> str | None:
    return None if trial.unless_fp32 is None else f"{label}.{trial.unless_fp32}"
