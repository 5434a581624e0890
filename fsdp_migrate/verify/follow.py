"""
A node that lends its ranks, where torchrun runs over several.

The same command is given on every node. The one that RDZV_ENDPOINT names leads: it writes the jobs
into the folder that all nodes see, judges, and writes `result.json`. Each other node waits for
every job, runs its own agent, and ends with the leader's result.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fsdp_migrate.errors import Incomplete
from fsdp_migrate.verify.experiment import SIDES
from fsdp_migrate.verify.launchers import Launcher
from fsdp_migrate.verify.trial import Job

POLL = 0.5


def follow(folder: Path, launcher: Launcher, patience: float) -> dict[str, Any]:
    """
    Run this node's share of both launches; the leader's result.

    Raises Incomplete where the leader is silent for `patience` seconds.
    """
    for side in SIDES:
        launcher.run(Job.read(_awaited(folder / side / "job.json", patience)))
    result: dict[str, Any] = json.loads(_awaited(folder / "result.json", patience).read_text())
    return result


def _awaited(file: Path, patience: float) -> Path:
    deadline = time.monotonic() + patience
    while not file.exists():
        if time.monotonic() > deadline:
            raise Incomplete(
                f"{file} did not come within {patience:g} s: is --out a folder that every node "
                "sees, and does the node of --rdzv-endpoint run the same command?"
            )
        time.sleep(POLL)
    return file
