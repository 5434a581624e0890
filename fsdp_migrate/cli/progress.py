"""
A bar with bytes, rate and time left on a terminal; a line every few seconds elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fsdp_migrate.cli.output import stderr

Stage: TypeAlias = Callable[[str, int], Callable[[int], None]]

_EVERY = 5.0  # seconds between lines where there is no terminal
_REDRAW = 0.1


@contextmanager
def stages(*, shown: bool) -> Iterator[Stage]:
    """Gives a function that begins a stage of so many bytes and returns how to tell of them."""
    if not shown:
        yield lambda _title, _total: lambda _count: None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description:>9}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=stderr(), refresh_per_second=10) as progress:

            def begin(title: str, total: int) -> Callable[[int], None]:
                task = progress.add_task(title, total=total)
                return _gathered(lambda count: progress.advance(task, count), _REDRAW)

            yield begin
    else:
        yield _lines


def _gathered(tell: Callable[[float], None], every: float) -> Callable[[int], None]:
    """Many small counts from several threads become few calls."""
    lock, waiting, last = threading.Lock(), 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal waiting, last
        with lock:
            waiting += count
            now = time.monotonic()
            if now - last >= every:
                tell(waiting)
                waiting, last = 0, now

    return advance


def _lines(title: str, total: int) -> Callable[[int], None]:
    started, done = time.monotonic(), 0

    def tell(count: float) -> None:
        nonlocal done
        done += int(count)
        elapsed = max(time.monotonic() - started, 1e-9)
        rate = done / elapsed
        left = max(total - done, 0) / rate if rate else 0.0
        sys.stderr.write(
            f"{title}: {size(done)} of {size(total)}, {size(int(rate))}/s, {left:.0f} s left\n"
        )

    return _gathered(tell, _EVERY)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError
