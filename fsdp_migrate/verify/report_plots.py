"""
The report's pictures, by matplotlib: one PNG a question, one panel a pair of runs.

    loss.png            do the curves lie on each other?
    difference.png      how far apart, step by step, against what rounding explains
    gradient_norm.png   the same for the norm that the optimizer saw
    resources.png       step time and peak memory, before and after
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_migrate.errors import TargetError
from fsdp_migrate.verify.summary import is_outside
from fsdp_migrate.verify.verdict import Parity, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people who see colours differently, and by shape in print.
BEFORE, AFTER, ALLOWED, EQUAL, WRONG = "#4477aa", "#ee7733", "#bbbbbb", "#228833", "#cc3311"
LOWEST = 1e-10  # the floor lies below any difference that fp32 can show
LEAST_RANGE = 0.02  # of a value: what a loss or norm axis shows at least
MIB = 2**20


def draw(parity: Parity, folder: Path) -> tuple[Path, ...]:
    """The PNGs that were written to `folder`; none where no step was compared."""
    compared = [series for series in parity.series if series.points]
    if not compared:
        return ()
    finding = parity.verdict.finding
    step = finding.step if finding is not None else None
    pictures = {
        "loss.png": _panels(compared, _loss, "loss (mean over ranks)", step),
        "difference.png": _panels(compared, _difference, "relative difference of the loss", step),
        "gradient_norm.png": _panels(compared, _norm, "gradient norm, before clipping", step),
        "resources.png": _resources(compared),
    }
    for name, figure in pictures.items():
        try:
            figure.savefig(folder / name, dpi=110)
        except OSError as error:
            raise TargetError(f"{folder / name}: the picture cannot be written: {error}") from error
    return tuple(folder / name for name in pictures)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(
    compared: list[Series],
    panel: Callable[[Axes, Series], None],
    quantity: str,
    failed_step: int | None,
) -> Figure:
    from matplotlib.ticker import MaxNLocator

    figure = _figure(1.5 + 4.6 * len(compared), 4.2)
    for axes, series in zip(_row(figure, len(compared)), compared, strict=True):
        panel(axes, series)
        if failed_step is not None and failed_step <= series.points[-1].step:
            axes.axvline(
                failed_step, color=WRONG, lw=1, ls=":", label=f"fails at step {failed_step}"
            )
        axes.set_title(f"{series.name} mode" if series.name != "fp32" else "fp32")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(quantity)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    return figure


def _row(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(1, count, squeeze=False)[0])


def _loss(axes: Axes, series: Series) -> None:
    _overlay(axes, series, lambda p: p.before, lambda p: p.after)


def _norm(axes: Axes, series: Series) -> None:
    _overlay(axes, series, lambda p: p.unclipped_before, lambda p: p.unclipped_after)


def _overlay(
    axes: Axes,
    series: Series,
    before: Callable[[Point], float | None],
    after: Callable[[Point], float | None],
) -> None:
    """The second curve is thin and marked, so that the first is seen beneath it."""
    steps = [point.step for point in series.points]
    known = [
        [math.nan if v is None else v for v in map(of, series.points)] for of in (before, after)
    ]
    axes.plot(steps, known[0], color=BEFORE, lw=4, alpha=0.6, label="before (FSDP1)")
    axes.plot(steps, known[1], color=AFTER, lw=1.2, marker="o", ms=3, label="after (FSDP2)")
    heights = [value for values in known for value in values if math.isfinite(value)]
    if heights and max(heights) - min(heights) < LEAST_RANGE * max(map(abs, heights)):
        # A curve that is flat but for rounding must look flat.
        axes.set_ylim(min(heights) * (1 - LEAST_RANGE), max(heights) * (1 + LEAST_RANGE))


def _difference(axes: Axes, series: Series) -> None:
    """Log scale; equal bits have no logarithm and lie on the floor, which is labelled so."""
    points = series.points
    shown = [p.difference for p in points if 0 < p.difference < math.inf]
    limits = [p.envelope for p in points if p.envelope and p.envelope < math.inf]
    floor = min([LOWEST, *(value / 10 for value in shown)])
    top = max([1e-6, *shown, *limits]) * 10
    if limits:
        allowed = [floor if p.envelope is None else min(p.envelope, top) for p in points]
        steps = [p.step for p in points]
        axes.fill_between(
            steps, floor, allowed, color=ALLOWED, alpha=0.4, label="what rounding explains (x3)"
        )
    for label, colour, marker, chosen in (
        ("equal bits", EQUAL, "s", [p for p in points if p.difference == 0]),
        ("differs", AFTER, "o", [p for p in points if p.difference != 0 and not is_outside(p)]),
        ("outside", WRONG, "X", [p for p in points if p.difference != 0 and is_outside(p)]),
    ):
        if chosen:
            heights = [_height(p.difference, floor, top) for p in chosen]
            axes.plot([p.step for p in chosen], heights, marker, color=colour, ms=5, label=label)
    axes.set_yscale("log")
    axes.set_ylim(floor / 10, top * 3)
    axes.axhline(floor, color=EQUAL, lw=0.8)
    axes.annotate(
        "equal bits", (0.99, floor / 1.2), xycoords=("axes fraction", "data"), color=EQUAL,
        fontsize=8, ha="right", va="top",
    )  # fmt: skip


def _height(difference: float, floor: float, top: float) -> float:
    if difference == 0:
        return floor
    return difference if difference < top else top  # not a number, infinite: at the upper edge


def _resources(compared: list[Series]) -> Figure:
    from matplotlib.patches import Patch

    figure = _figure(11, 3.8)
    times, memory = _row(figure, 2)
    for place, series in enumerate(compared):
        before = [p.seconds_before * 1e3 for p in series.points[1:] if p.seconds_before is not None]
        after = [p.seconds_after * 1e3 for p in series.points[1:] if p.seconds_after is not None]
        for offset, colour, values in ((-0.2, BEFORE, before), (0.2, AFTER, after)):
            if values:
                _bar(times, place + offset, colour, statistics.median(values), values)
        peaks = ((-0.2, BEFORE, series.peak_before), (0.2, AFTER, series.peak_after))
        for offset, colour, peak in peaks:
            _bar(memory, place + offset, colour, peak / MIB, None)
    on_cpu = compared[0].device == "cpu"
    times.set_ylabel("step time in ms (median; line: IQR)")
    memory.set_ylabel("peak host RSS, MiB" if on_cpu else "peak allocated on a GPU, MiB")
    for axes in (times, memory):
        axes.set_xticks(range(len(compared)), [series.name for series in compared])
        axes.margins(y=0.18)
    kinds = [Patch(color=BEFORE, label="before (FSDP1)"), Patch(color=AFTER, label="after (FSDP2)")]
    figure.legend(handles=kinds, loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(
        "Steps run under capture: they compare the two runs, they are no benchmark", fontsize=9
    )
    return figure


def _bar(axes: Axes, place: float, colour: str, height: float, values: list[float] | None) -> None:
    axes.bar(place, height, 0.38, color=colour)
    top = height
    if values is not None and len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        axes.vlines(place, low, high, color="black", lw=1.5)
        top = high
    axes.text(place, top, f"{height:,.4g}", ha="center", va="bottom", fontsize=8)
