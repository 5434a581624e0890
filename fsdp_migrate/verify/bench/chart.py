"""The table as a picture: throughput and peak memory, one bar a row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_migrate.errors import TargetError
from fsdp_migrate.verify.bench.table import Line, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPEED, MEMORY, RESERVED, REFERENCE = "#4477aa", "#44aa77", "#bbddcc", "#aa4455"
GIB = 2**30


def draw(table: Table, file: Path) -> None:
    """A PNG. Rows that didn't run keep their place, with the reason instead of a bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.6 + 0.5 * len(table.lines)
    figure = Figure(figsize=(13, height), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    setup = table.setup
    figure.suptitle(
        f"{setup.ranks} x {table.device}, {setup.dtype}, global batch {setup.global_batch} x "
        f"{setup.seq_len} tokens, {setup.steps} steps"
    )
    _speed(speed, table)
    _memory(memory, table)
    speed.set_yticks(range(len(table.lines)), [line.title for line in table.lines])
    # Set, not found: a row without a bar must keep its place. The first row is on top.
    speed.set_ylim(len(table.lines) - 0.4, -0.9)
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise TargetError(f"{file}: the chart cannot be written: {error}") from error


def _speed(axes: Axes, table: Table) -> None:
    unit = "GPU" if table.setup.device == "cuda" else "rank"
    axes.set_xlabel(f"tokens/s per {unit} (median step; line: interquartile range)")
    reference = next((line for line in table.lines if line.name == "fsdp1"), None)
    if reference is not None and reference.tokens_per_second_per_gpu is not None:
        level = reference.tokens_per_second_per_gpu
        axes.axvline(level, color=REFERENCE, ls="--", lw=1, zorder=0)
        axes.text(level, -0.65, " FSDP1", color=REFERENCE, va="center", fontsize=8)
    for place, line in enumerate(table.lines):
        speed = line.tokens_per_second_per_gpu
        if speed is None:
            axes.text(0, place, f" {_short(line)}", va="center", color=REFERENCE, fontsize=8)
            continue
        assert line.step_median and line.step_q1 and line.step_q3
        tokens = speed * line.step_median
        low, high = tokens / line.step_q3, tokens / line.step_q1
        axes.barh(place, speed, color=SPEED, xerr=[[speed - low], [high - speed]], ecolor="black")
        axes.text(max(speed, high), place, f"  {_label(line)}", va="center", fontsize=9)
    axes.margins(x=0.45)  # for the labels at the ends of the bars
    axes.set_xlim(left=0)


def _memory(axes: Axes, table: Table) -> None:
    on_gpu = table.setup.device == "cuda"
    axes.set_xlabel("peak GiB per GPU" if on_gpu else "peak host RSS, GiB per rank")
    for place, line in enumerate(table.lines):
        if line.peak_reserved is not None:
            axes.barh(place, line.peak_reserved / GIB, color=RESERVED, label="reserved")
        used = line.peak_allocated if on_gpu else line.host_rss
        if used is not None:
            axes.barh(place, used / GIB, color=MEMORY, label="allocated", height=0.5)
            end = max(used, line.peak_reserved or 0) / GIB
            parts = [used] if line.peak_reserved is None else [used, line.peak_reserved]
            label = " / ".join(f"{part / GIB:.2f}" for part in parts)
            axes.text(end, place, f" {label}", va="center", fontsize=9)
    if on_gpu:
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.legend(once.values(), once.keys(), loc="upper right", ncols=2, fontsize=8)
    axes.margins(x=0.35)
    axes.set_xlim(left=0)


def _label(line: Line) -> str:
    parts = [f"{line.tokens_per_second_per_gpu:,.0f}"]
    if line.ratio is not None:
        parts.append(f"{line.ratio:.2f}x")
    if line.mfu is not None:
        parts.append(f"MFU {line.mfu:.1%}")
    return "  ".join(parts)


def _short(line: Line) -> str:
    text = f"{line.status}: {line.reason.partition('; see ')[0]}"
    return text if len(text) <= 80 else text[:77] + "..."
