"""
torchrun: one agent on this node, or one on each of several (c10d rendezvous).

With several nodes the same command is given on each of them; RDZV_ENDPOINT names the first, which
holds the rendezvous store.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.errors import Unsupported, UsageError
from fsdp_migrate.verify.processes import last_lines, run_group
from fsdp_migrate.verify.trial import Job


@dataclass(frozen=True)
class Torchrun:
    """`endpoint` (host:port of the first node) is needed with several nodes only."""

    endpoint: str | None = None
    run_id: str = "fsdp-migrate"
    wait: float = 300.0  # seconds that ranks may take to start
    name: str = "torchrun"

    @property
    def leads(self) -> bool:
        """Whether the endpoint is on this node."""
        return self.endpoint is None or is_here(self.endpoint)

    def command(self, job: Job, *, python: str = sys.executable, hosting: str = "") -> list[str]:
        meeting = self.endpoint or "localhost:0"
        return [
            python,
            "-m",
            "torch.distributed.run",
            f"--nnodes={job.nnodes}",
            f"--nproc-per-node={job.nproc_per_node}",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={meeting}",
            # The second launch must not meet what is left of the first.
            f"--rdzv-id={self.run_id}-{job.folder.name}",
            f"--rdzv-conf=join_timeout={self.wait:.0f},timeout={self.wait:.0f}{hosting}",
            "-m",
            "fsdp_migrate.verify.worker",
            str(job.file),
        ]

    def script(self, job: Job) -> str:
        lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
        if job.nnodes > 1:
            lines.append("# Run this on every node; the endpoint is a free port of the first one.")
        return "\n".join([*lines, shlex.join(self.command(job, python="python")), ""])

    def run(self, job: Job) -> None:
        log, hosting = job.folder / "torchrun.log", ""
        if job.nnodes > 1:
            log = job.folder / f"torchrun-{socket.gethostname()}.log"
            # Said, rather than guessed by torchrun from the names that this node goes by.
            hosting = f",is_host={int(self.leads)}"
        command = self.command(job, hosting=hosting)
        code = run_group(command, environment(), log, job.started, self.wait)
        if code != 0:
            why = f"exit code {code}" if code else f"none had started after {self.wait:g} s"
            raise Unsupported(
                f"torchrun could not run the ranks ({why}); log: {log}\n{last_lines(log)}"
            )


def is_here(endpoint: str) -> bool:
    """Whether the address of HOST:PORT is this machine's: a socket can be bound to no other."""
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UsageError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT")
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--rdzv-endpoint {endpoint}: {host} is not known: {error}") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def environment() -> dict[str, str]:
    """The ranks find this package even where it is not installed, and share the cores."""
    package = Path(__file__).parents[3]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
