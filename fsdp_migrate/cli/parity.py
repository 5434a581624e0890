"""How a comparison looks on the terminal: progress while it runs, tables when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from fsdp_migrate.cli.output import stdout

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table

    from fsdp_migrate.verify.verdict import Parity, Point, Series

FILE_WIDTH = 110  # columns of a table that isn't read on a terminal
MIB = 2**20
Follow = Callable[[str, str, int], None]  # side, trial, steps made so far


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Follow]:
    """A bar for each trial of each script; where nobody watches, a line at every quarter."""
    if not console.is_terminal:
        yield _lines(console, steps)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def follow(side: str, trial: str, made: int) -> None:
            name = f"{side}: {trial}"
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=steps)
            bars.update(tasks[name], completed=made)

        yield follow


def _lines(console: Console, steps: int) -> Follow:
    told: set[tuple[str, str, int]] = set()

    def follow(side: str, trial: str, made: int) -> None:
        quarter = 4 * made // steps
        if (side, trial, quarter) not in told:
            told.add((side, trial, quarter))
            console.print(f"{side} {trial}: step {made} of {steps}", markup=False)

    return follow


def show(parity: Parity) -> None:
    """The steps of every pair, a summary, what limits the proof; the last line is the verdict."""
    console = stdout()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    for series in parity.series:
        console.print(_steps(series))
    if parity.series:
        console.print(_summary(parity))
    for name in parity.passed:
        console.print(f"passed: {name}", markup=False)
    for note in parity.notes:
        console.print(f"note: {note}", markup=False)
    if parity.redirections:
        console.print("ran on the CPU instead: " + "; ".join(parity.redirections), markup=False)
    colour = {"PASS": "green", "FAIL": "red"}.get(parity.verdict.kind.name, "yellow")
    console.print(parity.verdict.sentence, style=f"bold {colour}", markup=False)


def _steps(series: Series) -> Table:
    from rich.table import Table

    from fsdp_migrate.verify.summary import is_outside

    table = Table(title=series.name, title_justify="left")
    for heading in ("step", "loss before", "loss after", "difference", "allowed", "norm"):
        table.add_column(heading, justify="right")
    for point in series.points:
        table.add_row(*_step(point), style="red" if is_outside(point) else None)
    return table


def _step(point: Point) -> tuple[str, ...]:
    return (
        str(point.step),
        f"{point.before:.8g}",
        f"{point.after:.8g}",
        "equal" if point.difference == 0 else f"{point.difference:.2e}",
        _scientific(point.envelope),
        "-" if point.norm_after is None else f"{point.norm_after:.6g}",
    )


def _summary(parity: Parity) -> Table:
    from rich.table import Table

    from fsdp_migrate.verify.summary import summarise

    on_cpu = parity.series[0].device == "cpu"
    table = Table(title="summary", title_justify="left")
    memory = "host RSS MiB" if on_cpu else "GPU peak MiB"
    for heading in ("mode", "steps", "equal", "worst", "allowed", "ms/step", memory):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for series in parity.series:
        one = summarise(series)
        worst = one.worst
        table.add_row(
            one.name,
            str(one.steps),
            str(one.equal),
            _worst(worst),
            "-" if worst is None else _scientific(worst.envelope),
            f"{_milliseconds(one.seconds_before)} -> {_milliseconds(one.seconds_after)}",
            f"{series.peak_before / MIB:,.0f} -> {series.peak_after / MIB:,.0f}",
        )
    return table


def _worst(point: Point | None) -> str:
    if point is None or point.difference == 0:
        return "-"
    return f"{point.difference:.1e} at step {point.step}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
