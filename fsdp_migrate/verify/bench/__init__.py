"""
`fsdp-migrate bench`: the same model, data and step, spread in every way that is worth comparing.

    setup.py      what is benched
    models/       where the model comes from, one file a kind of source
    rows/         one file a row of the table
    rank.py       what each rank runs; training.py is the timed loop
    start.py      starts a row's ranks, and turns what they left into an Outcome
    table.py      the lines of the table, CSV and JSON; chart.py draws it
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fsdp_migrate.errors import TargetError, Unsupported
from fsdp_migrate.verify.bench import start
from fsdp_migrate.verify.bench.outcome import Outcome
from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.setup import Setup
from fsdp_migrate.verify.bench.table import Table, table, write

OWN_FILES = ("bench.json", "bench.csv", "bench.png")
ROW_FILES = "rows"


def bench(
    setup: Setup,
    rows: tuple[Row, ...],
    folder: Path,
    *,
    timeout: float,
    peak_tflops: float | None,
    overwrite: bool,
    on_start: Callable[[Row], None],
    on_end: Callable[[Outcome], None],
) -> Table:
    """
    Run each row in a process group of its own, and write CSV and JSON to `folder`.

    A row that cannot run, runs out of memory, hangs or crashes is a line of the table. Raises
    `TargetError` where `folder` can't be used and `Unsupported` where no row ran at all.
    """
    _prepare(folder, overwrite)
    server = start.server(setup)
    outcomes = []
    for row in rows:
        on_start(row)
        outcomes.append(start.run(setup, row, folder / ROW_FILES / row.name, timeout, server))
        on_end(outcomes[-1])
    result = table(setup, outcomes, peak_tflops)
    if result.device is None:
        first = outcomes[0]
        raise Unsupported(f"no row ran; {first.row.title}: {first.status}: {first.reason}")
    write(result, folder)
    return result


def _prepare(folder: Path, overwrite: bool) -> None:
    """Only what an earlier bench wrote is ever removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            if not overwrite:
                raise TargetError(f"{folder} is not empty: pass --overwrite, or another --out")
            if not (folder / ROW_FILES).is_dir():
                raise TargetError(f"{folder} was not written by bench: it is left alone")
            for name in OWN_FILES:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / ROW_FILES)
    except OSError as error:
        raise TargetError(f"{folder}: {error}") from error
