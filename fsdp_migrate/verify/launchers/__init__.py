"""
Ways to start the ranks of a job.

A launcher starts `python -m fsdp_migrate.verify.worker JOB_FILE` once a rank, under one torchrun
agent per node, waits until all have ended, and leaves nothing running, whatever happens. What the
ranks found out is read from the job's folder afterwards: a script that fails is a trial's result,
not a launcher's error.
"""

from __future__ import annotations

from typing import Protocol

from fsdp_migrate.verify.trial import Job


class Launcher(Protocol):
    """One way to start ranks. `name` is what `--launcher` calls it."""

    @property
    def name(self) -> str: ...

    @property
    def leads(self) -> bool:
        """Whether this node makes the jobs and judges; else it only lends its ranks."""
        ...

    def script(self, job: Job) -> str:
        """The shell script that does what `run` does, for `--print-script`."""
        ...

    def run(self, job: Job) -> None:
        """
        Start every rank of the written job and wait for the end of all.

        Raises Unsupported when the ranks could not be started or an agent failed; ends what it
        started when interrupted.
        """
        ...
