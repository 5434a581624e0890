"""Start the ranks of one row, wait for them, and say what became of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from fsdp_migrate.verify.bench.outcome import Outcome, figures
from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.setup import Setup

LOG = "output.log"
GRACE = 45.0  # torchrun gives its ranks 30 s to end, then kills them
TELLING_FIRST = ("out of memory", "cannot run", "failed")


def run(setup: Setup, row: Row, folder: Path, timeout: float) -> Outcome:
    """One process group of its own; its files go to `folder`, which is created."""
    folder.mkdir(parents=True)
    setup_file = folder / "setup.json"
    setup_file.write_text(setup.to_json())
    with (folder / LOG).open("wb") as log:
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(setup.ranks), "--max-restarts", "0"),
                *("-m", "fsdp_migrate.verify.bench.rank"),
                *(str(setup_file), row.name, str(folder)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            code: int | None = agent.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(agent)
    return _outcome(setup, row, folder, code, timeout)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """torchrun starts each rank in a session of its own, so it must be asked to end them."""
    if agent.poll() is not None:
        return
    agent.terminate()
    try:
        agent.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _outcome(setup: Setup, row: Row, folder: Path, code: int | None, timeout: float) -> Outcome:
    files = [folder / f"rank{rank}.json" for rank in range(setup.ranks)]
    records = [json.loads(file.read_text()) for file in files if file.exists()]
    bad = [record for record in records if record["status"] != "ran"]
    if bad:
        # One rank's failure breaks the others' connections: tell the cause, not the echo.
        first = min(bad, key=lambda r: (TELLING_FIRST.index(r["status"]), r["ended"]))
        return Outcome(row, first["status"], _with_log(first, folder))
    if code is None:
        return Outcome(row, "timed out", f"no end after {timeout:g} s; see {folder / LOG}")
    if len(records) < setup.ranks:
        return Outcome(row, "failed", _died(folder, code))
    return Outcome(row, "ran", figures=figures(records, setup))


def _with_log(record: dict[str, Any], folder: Path) -> str:
    reason: str = record["reason"]
    return reason if record["status"] == "cannot run" else f"{reason}; see {folder / LOG}"


def _died(folder: Path, code: int) -> str:
    """torchrun's own report names the exit code of the first rank that died."""
    log = folder / LOG
    told = re.search(r"exitcode\s*:\s*(-?\d+)", log.read_text(errors="replace"))
    code = int(told[1]) if told else code
    if code == -signal.SIGKILL:
        return f"a rank was killed by SIGKILL, most often for want of host memory; see {log}"
    what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"a rank ended with {what} and left no result; see {log}"
