"""
Time two commands against each other: in turns, from the same page cache, on the same disk.

Peak memory is the kernel's own figure for the process. Wall time and memory of a process are
those of `os.wait4`; the benchmark itself imports nothing large, because a child's peak begins
with its parent's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

Command = Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of wall time, seconds of processor time, bytes of memory at the peak."""

    wall: float
    cpu: float
    memory: int


@dataclass(frozen=True, slots=True)
class Pair:
    """`ours` and `theirs` are medians, `ratio` and `cpu_ratio` those of each turn's ratio."""

    ours: Run
    theirs: Run
    ratio: float
    cpu_ratio: float


def run(command: Command) -> Run:
    """Run to its end; its output is shown only if it fails, which ends the benchmark."""
    started = time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{output.decode()}exit {process.returncode}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def ours_and_theirs(
    ours: Callable[[Path], Command],
    theirs: Callable[[Path], Command],
    source: Path,
    output: Path,
    repeats: int,
) -> Pair:
    """Each turn runs both, the first of them in turns too; the output is removed before each."""
    runs: dict[str, list[Run]] = {"ours": [], "theirs": []}
    read_all(source)
    for turn in range(repeats):
        for name, command in (("ours", ours), ("theirs", theirs))[:: 1 if turn % 2 else -1]:
            remove(output)
            os.sync()  # neither side pays for bytes that the other left to be written
            runs[name].append(run(command(output)))
    remove(output)
    pairs = list(zip(runs["ours"], runs["theirs"], strict=True))
    return Pair(
        _middle(runs["ours"]),
        _middle(runs["theirs"]),
        median(a.wall / b.wall for a, b in pairs),
        median(a.cpu / b.cpu for a, b in pairs),
    )


def read_all(folder: Path) -> None:
    """Bring the files of `folder` into the page cache."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 20):
                    pass


def remove(path: Path) -> None:
    for found in path.parent.glob(f"{path.name}*"):
        if found.is_dir():
            shutil.rmtree(found)
        else:
            found.unlink()


def _middle(runs: Sequence[Run]) -> Run:
    return Run(
        median(run.wall for run in runs),
        median(run.cpu for run in runs),
        int(median(run.memory for run in runs)),
    )
