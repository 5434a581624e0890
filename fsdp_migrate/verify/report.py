"""
`report.html`: one file that can be mailed, opened offline and printed.

Styles and pictures are inside it; nothing is fetched, no script runs. What comes from the user's
run (paths, messages, names of tensors) is escaped.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from fsdp_migrate import __version__
from fsdp_migrate.errors import TargetError
from fsdp_migrate.verify.experiment import Experiment, Side
from fsdp_migrate.verify.summary import Summary, is_outside, summarise
from fsdp_migrate.verify.verdict import Parity, Point, Series

CAPTIONS = {
    "loss.png": "Loss of both runs, mean over ranks.",
    "difference.png": "Largest relative difference of a loss over ranks and micro-batches. The "
    "band is measured: three times the drift that a rounding causes in the first run.",
    "gradient_norm.png": "Global gradient norm before clipping, as clip_grad_norm_ told it to the "
    "script on rank 0; where nothing is clipped, as the optimizer saw it.",
    "resources.png": "Step time and peak memory.",
}
COLOURS = {"PASS": "#228833", "FAIL": "#cc3311", "INCONCLUSIVE": "#b37400"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; }
h1 { font-size: 1.1rem; color: #666; font-weight: 600; }
h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
.verdict { color: #fff; border-radius: 6px; padding: .8rem 1.1rem; white-space: pre-wrap; }
.verdict strong { font-size: 1.3rem; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
td.left { text-align: left; }
tr.outside td { background: #fbe3df; }
figure { margin: 1rem 0; } figure img { max-width: 100%; } figcaption { color: #555; }
code { overflow-wrap: anywhere; }
summary { cursor: pointer; margin: .4rem 0; }
"""


def write(parity: Parity, experiment: Experiment, folder: Path) -> bool:
    """Write the pictures and `report.html` to `folder`; False: without pictures, no matplotlib."""
    pictures: tuple[Path, ...] = ()
    drawable = importlib.util.find_spec("matplotlib") is not None
    if drawable:
        from fsdp_migrate.verify import report_plots

        pictures = report_plots.draw(parity, folder)
    beside = folder / "report.html.partial"
    try:
        beside.write_text(page(parity, experiment, pictures, drawable=drawable), encoding="utf-8")
        beside.rename(folder / "report.html")
    except OSError as error:
        raise TargetError(f"{folder / 'report.html'}: cannot be written: {error}") from error
    return drawable


def page(
    parity: Parity, experiment: Experiment, pictures: Sequence[Path], *, drawable: bool
) -> str:
    verdict = parity.verdict
    title = f"fsdp-migrate verify: {verdict.title}"
    missing = "" if drawable else "<p>No pictures: matplotlib is not installed.</p>"
    parts = [
        f"<h1>fsdp-migrate verify {__version__}</h1>",
        f'<div class="verdict" style="background:{COLOURS[verdict.kind.name]}">'
        f"<strong>{_text(verdict.title)}</strong>{_text(verdict.message)}</div>",
        "<h2>What was run</h2>",
        _facts(experiment),
        _list("Checks that passed", parity.passed),
        _list("What limits the proof", [*parity.notes, *_redirected(parity)]),
        "<h2>Summary</h2>",
        _summary([summarise(series) for series in parity.series], parity.series),
        "<h2>Pictures</h2>" if pictures else missing,
        *(_figure(picture) for picture in pictures),
        "<h2>Every step</h2>" if parity.series else "",
        *(_steps(series) for series in parity.series),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _redirected(parity: Parity) -> list[str]:
    return [f"ran on the CPU instead: {call}" for call in parity.redirections]


def _facts(experiment: Experiment) -> str:
    ranks = experiment.nnodes * experiment.nproc_per_node
    rows = [
        ("before", _command(experiment.before)),
        ("after", _command(experiment.after)),
        ("ranks", f"{ranks} ({experiment.nnodes} nodes x {experiment.nproc_per_node})"),
        ("steps", str(experiment.steps)),
        ("seed", str(experiment.seed)),
        ("device", experiment.device),
        ("modes", ", ".join(experiment.modes)),
        (
            "same start",
            "replayed from the first run" if experiment.same_init else "as the scripts do",
        ),
    ]
    cells = (
        f'<tr><td>{_text(k)}</td><td class="left"><code>{_text(v)}</code></td></tr>'
        for k, v in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _command(side: Side) -> str:
    return shlex.join([str(side.script), *side.args])


def _list(heading: str, items: Iterable[str]) -> str:
    entries = "".join(f"<li>{_text(item)}</li>" for item in items)
    return f"<h2>{heading}</h2><ul>{entries}</ul>" if entries else ""


def _summary(summaries: Sequence[Summary], series: Sequence[Series]) -> str:
    if not summaries:
        return "<p>No steps were compared.</p>"
    heads = ("mode", "steps", "equal to the bit", "largest difference", "at step", "allowed there",
             "ms/step before", "after", "peak MiB before", "after")  # fmt: skip
    rows = []
    for one, pair in zip(summaries, series, strict=True):
        rows.append((
            one.name,
            str(one.steps),
            str(one.equal),
            *_worst(one.worst),
            _milliseconds(one.seconds_before),
            _milliseconds(one.seconds_after),
            f"{pair.peak_before / 2**20:,.0f}",
            f"{pair.peak_after / 2**20:,.0f}",
        ))  # fmt: skip
    memory = {"cpu": "host RSS of a rank", "cuda": "allocated on one GPU"}.get(series[0].device, "")
    note = f"<p>Peak memory: {memory}. Step times are medians, under capture.</p>" if memory else ""
    return _table(heads, rows) + note


def _worst(point: Point | None) -> tuple[str, str, str]:
    """The largest difference, its step, and what was allowed there."""
    if point is None or point.difference == 0:
        return "-", "-", "-"
    return f"{point.difference:.2e}", str(point.step), _number(point.envelope, ".2e")


def _steps(series: Series) -> str:
    heads = ("step", "loss before", "loss after", "difference", "allowed", "norm before",
             "norm after", "learning rates")  # fmt: skip
    rows = [_step(point) for point in series.points]
    marked = {place for place, point in enumerate(series.points) if is_outside(point)}
    table = _table(heads, rows, marked)
    return f"<details><summary>{_text(series.name)}: {len(rows)} steps</summary>{table}</details>"


def _step(point: Point) -> tuple[str, ...]:
    return (
        str(point.step),
        f"{point.before:.9g}",
        f"{point.after:.9g}",
        "equal" if point.difference == 0 else f"{point.difference:.2e}",
        _number(point.envelope, ".2e"),
        _number(point.norm_before, ".7g"),
        _number(point.norm_after, ".7g"),
        ", ".join(f"{rate:.4g}" for rate in point.rates),
    )


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], marked: set[int] | None = None
) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr{' class=outside' if marked and place in marked else ''}>"
        + "".join(f"<td>{_text(cell)}</td>" for cell in row)
        + "</tr>"
        for place, row in enumerate(rows)
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _figure(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode("ascii")
    caption = CAPTIONS[picture.name]
    return (
        f'<figure><img alt="{_text(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _text(text: str) -> str:
    return html.escape(text)
