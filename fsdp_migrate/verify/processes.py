"""A command in a process group of its own, of which nothing is left when the call returns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 20.0  # seconds between asking a group to end and ending it


def run_group(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    started: Path | None = None,
    patience: float | None = None,
) -> int | None:
    """
    Run to the end with output to `log`; on any interruption the whole group is ended.

    None when the file `started` did not appear within `patience` seconds.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(patience)
        return None if started and not started.exists() else process.wait()
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """
    SIGTERM, then SIGKILL, to the process's own group.

    torchrun's agent puts its ranks into groups of their own and passes SIGTERM on to them; should
    it be killed first, the ranks end with it (`worker.die_with_parent`).
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path, count: int = 25) -> str:
    """The end of a log, for a message."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
