"""
Start the ranks of one row on this machine, wait for them, and say what became of it.

Ranks are forked from a server that has imported torch and done nothing else, so that a row costs
no imports; each row has new processes, a new store and a new process group. The ranks meet at a
store which this process holds, on a port that the system chose.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_migrate.verify.bench import rank
from fsdp_migrate.verify.bench.outcome import Outcome, figures
from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.setup import Setup

LOG = "output.log"
GRACE = 3.0  # seconds for the other ranks to tell their own reason once one has failed
TELLING_FIRST = ("out of memory", "cannot run", "failed")


def server(setup: Setup) -> ForkServerContext:
    """Where ranks are forked from; it starts with the first row and ends with this process."""
    context = get_context("forkserver")
    # Any model of transformers brings in most of what these two do.
    models = ("auto.modeling_auto", "llama.modeling_llama") if setup.hf_config is not None else ()
    heavy = [f"transformers.models.{name}" for name in models]
    context.set_forkserver_preload([rank.__name__, "torch._dynamo", *heavy])
    return context


def run(
    setup: Setup, row: Row, folder: Path, timeout: float, context: ForkServerContext
) -> Outcome:
    """One row, whose files go to `folder`, which is created. Nothing of it is left running."""
    folder.mkdir(parents=True)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    log = folder / LOG
    processes = [
        context.Process(target=rank.main, args=(setup, row.name, folder, log, place, store.port))
        for place in range(setup.ranks)
    ]
    with _ended(processes):
        for process in processes:
            process.start()
        in_time = _wait(processes, timeout)
        codes = [process.exitcode for process in processes]  # None: still running, ended by us
    return _outcome(setup, row, folder, codes, None if in_time else timeout)


@contextlib.contextmanager
def _ended(processes: list[ForkServerProcess]) -> Iterator[None]:
    """Each rank leads a process group of its own, which its compiler's helpers belong to."""
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # it may not have come to lead its group yet
                process.join()


def _wait(processes: list[ForkServerProcess], timeout: float) -> bool:
    """Until all have ended, or one has failed and the others had time to; False: not in time."""
    deadline = time.monotonic() + timeout
    while running := [process for process in processes if process.exitcode is None]:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
        left = deadline - time.monotonic()
        if left <= 0:
            return any(process.exitcode for process in processes)
        connection.wait([process.sentinel for process in running], left)
    return True


def _outcome(
    setup: Setup, row: Row, folder: Path, codes: list[int | None], timeout: float | None
) -> Outcome:
    files = [folder / f"rank{place}.json" for place in range(setup.ranks)]
    records = [json.loads(file.read_text()) for file in files if file.exists()]
    if timeout is not None:
        return Outcome(row, "timed out", f"no end after {timeout:g} s; see {folder / LOG}")
    # One rank's failure breaks the others' connections: tell the cause, not the echo.
    bad = [record for record in records if record["status"] != "ran"]
    first = min(bad, key=lambda r: (TELLING_FIRST.index(r["status"]), r["ended"]), default=None)
    told_well = first is not None and first["status"] != "failed"
    silent = [place for place, file in enumerate(files) if codes[place] and not file.exists()]
    if silent and not told_well:
        return Outcome(row, "failed", f"{_died(silent[0], codes[silent[0]])}; see {folder / LOG}")
    if first is not None:
        return Outcome(row, first["status"], _reason(first, folder))
    return Outcome(row, "ran", figures=figures(records, setup))


def _reason(record: dict[str, Any], folder: Path) -> str:
    reason: str = record["reason"]
    return reason if record["status"] == "cannot run" else f"{reason}; see {folder / LOG}"


def _died(place: int, code: int | None) -> str:
    assert code
    if code > 0:
        return f"rank {place} ended with exit code {code} and left no result"
    want = ", most often for want of host memory" if code == -signal.SIGKILL else ""
    return f"rank {place} was killed by {signal.Signals(-code).name}{want}"
