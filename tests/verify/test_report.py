"""What a person sees: report.html, its pictures, the tables of the terminal, the progress."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from fsdp_migrate.cli.parity import progress, show
from fsdp_migrate.errors import TargetError
from fsdp_migrate.verify import report, report_plots
from fsdp_migrate.verify.judge import series
from fsdp_migrate.verify.summary import summarise
from fsdp_migrate.verify.trial import Clip, Model, Parameter, RankTrace, Step, Trace
from fsdp_migrate.verify.verdict import Pair, Parity
from tests.verify.samples import EQUAL, EXPERIMENT, FAIL, NOISE, NOTHING, PASS, STEPS, point

PICTURES = ["loss.png", "difference.png", "gradient_norm.png", "resources.png"]


class Page(HTMLParser):
    """The elements, their attributes and the text of a page, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def written(parity: Parity, folder: Path) -> Page:
    report.write(parity, EXPERIMENT, folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_report_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    """No link, script or picture points outside; the pictures inside are those beside it."""
    page = written(PASS, tmp_path)
    images = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    prefix = "data:image/png;base64,"

    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("href" in attributes for _, attributes in page.tags)
    assert all(image.startswith(prefix) for image in images)
    assert "url(" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [base64.b64decode(image[len(prefix) :]) for image in images] == [
        (tmp_path / name).read_bytes() for name in PICTURES
    ]


def test_the_report_says_the_verdict_what_passed_and_what_limits_it(tmp_path: Path) -> None:
    """Everything the terminal says, and every step of every pair."""
    page = written(PASS, tmp_path)
    text = " ".join(page.text)

    assert "PASS (bitwise)" in text
    assert PASS.verdict.message in text
    assert all(name in text for name in PASS.passed)
    assert "ran on the CPU instead: torch.cuda.set_device" in text
    assert "host RSS" in text
    assert page.count("details") == 2
    assert {f"{p.after:.9g}" for p in NOISE.points} <= set(page.text)


def test_what_comes_from_the_user_is_text_and_never_markup(tmp_path: Path) -> None:
    """An argument and a tensor name with angle brackets are shown as they are."""
    page = written(FAIL, tmp_path)

    assert page.count("b") == 0
    assert any("<b>1e-3</b>" in text for text in page.text)
    assert any("<layers.0.weight>" in text for text in page.text)
    assert any("dropout & co." in text for text in page.text)


def test_steps_outside_the_envelope_are_marked(tmp_path: Path) -> None:
    """All but the first three steps of the broken run."""
    page = written(FAIL, tmp_path)

    marked = [attributes for tag, attributes in page.tags if attributes.get("class") == "outside"]
    assert len(marked) == STEPS - 3


def test_nothing_compared_is_a_report_without_pictures(tmp_path: Path) -> None:
    """An inconclusive run has a reason to show, and no steps."""
    page = written(NOTHING, tmp_path)

    assert any("both runs fell back to DDP" in text for text in page.text)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_without_matplotlib_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is optional: tables are there, pictures are missed aloud."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    drawn = report.write(PASS, EXPERIMENT, tmp_path)

    assert not drawn
    assert "matplotlib is not installed" in (tmp_path / "report.html").read_text()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """An error of the output's kind, with the file's name."""
    with pytest.raises(TargetError, match=r"loss\.png"):
        report.write(PASS, EXPERIMENT, tmp_path / "gone")


def difference_axes(parity: Parity, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The panel of the relative difference of the only pair."""
    kept: list[Any] = []
    draw = report_plots._difference
    monkeypatch.setattr(
        report_plots, "_difference", lambda axes, series: (kept.append(axes), draw(axes, series))
    )
    report_plots.draw(parity, folder)
    return kept[0]


def marks(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
    }


def test_equal_bits_lie_on_the_floor_of_a_log_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero has no logarithm: those points are drawn on a line of their own, not left out."""
    axes = difference_axes(replace(PASS, series=(NOISE,)), monkeypatch, tmp_path)
    drawn = marks(axes)
    floor = drawn["equal bits"][0][1]

    assert axes.get_yscale() == "log"
    assert [x for x, _ in drawn["equal bits"]] == [0, 1]
    assert len(drawn["differs"]) == STEPS - 2
    assert floor < min(y for _, y in drawn["differs"]) / 5
    assert "outside" not in drawn


def test_the_envelope_is_a_band_and_what_leaves_it_stands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The band ends at the measured envelope, and the failing step has a line."""
    axes = difference_axes(FAIL, monkeypatch, tmp_path)
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices

    assert corners[:, 1].max() == pytest.approx(FAIL.series[0].points[-1].envelope)
    assert len(marks(axes)["outside"]) == STEPS - 3
    assert marks(axes)["fails at step 3"][0][0] == 3


@pytest.mark.parametrize("gap", [math.inf, math.nan])
def test_a_difference_that_is_no_number_is_drawn_at_the_upper_edge(
    gap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that became NaN must not vanish from the picture, nor count as inside."""
    broken = replace(NOISE, points=(point(0, 0.0, 1e-6), point(1, gap, 1e-6)))
    axes = difference_axes(replace(FAIL, series=(broken,)), monkeypatch, tmp_path)

    ((step, height),) = marks(axes)["outside"]
    assert step == 1 and 1e-6 < height < math.inf


def test_pictures_are_not_empty(tmp_path: Path) -> None:
    """Each has more than a handful of colours on it."""
    for file in report_plots.draw(PASS, tmp_path):
        pixels = imread(file)[..., :3].reshape(-1, 3)

        assert len({tuple(p) for p in pixels[::7].round(2).tolist()}) > 8, file.name


def test_a_summary_counts_equal_steps_and_finds_the_worst() -> None:
    """And the steps that left the envelope; the first step's time is warm-up and left out."""
    equal, noisy, broken = (summarise(s) for s in (EQUAL, NOISE, FAIL.series[0]))

    assert (equal.equal, noisy.equal, broken.equal) == (STEPS, 2, 2)
    assert noisy.worst is not None and noisy.worst.difference == pytest.approx(4e-7)
    assert (noisy.outside, broken.outside) == ((), tuple(range(3, STEPS)))
    assert noisy.seconds_before == pytest.approx(0.034)


@pytest.mark.parametrize("parity", [PASS, FAIL, NOTHING])
def test_the_last_line_on_the_terminal_is_the_verdict(
    parity: Parity, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the tables of the steps and the summary."""
    show(parity)

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == parity.verdict.sentence
    assert sum(line.startswith("summary") for line in lines) == bool(parity.series)


def test_where_nobody_watches_progress_is_a_few_lines() -> None:
    """A log file gets a line at every quarter, not one a step."""
    out = StringIO()
    with progress(Console(file=out), 100) as follow:
        for made in range(101):
            follow("before", "exact", made)

    lines = out.getvalue().splitlines()
    assert lines[0] == "before exact: step 0 of 100"
    assert lines[-1] == "before exact: step 100 of 100"
    assert len(lines) == 5


def test_on_a_terminal_every_trial_of_both_runs_has_a_bar() -> None:
    """With the steps made and to make."""
    out = StringIO()
    with progress(Console(file=out, force_terminal=True, width=80), 20) as follow:
        follow("before", "exact", 20)
        follow("after", "exact", 7)

    assert "before: exact" in out.getvalue()
    assert "7/20" in out.getvalue()


def trace(name: str, losses: list[float]) -> Trace:
    parameter = Parameter(
        shape=(4,),
        dtype="torch.float32",
        requires_grad=True,
        kind="fsdp1",
        layout="FULL_SHARD",
        degrees=(1, 1, 1),
        reduce_dtype="torch.float32",
        compute_dtype="torch.float32",
        extent="0:4",
        part=None,
    )
    steps = tuple(
        Step(losses=(loss,), final={"w": 0.25}, clips=(Clip(0.5, 3.0), Clip(0.5, 4.0)))
        for loss in losses
    )
    rank = RankTrace(0, Model({}, {"w": parameter}, {}, ()), (), steps, device="cpu")
    return Trace(name, Path(), (rank,))


def test_where_equal_bits_are_due_there_is_no_envelope() -> None:
    """A band would say that a difference is allowed, which the verdict does not."""
    before, after, control = (trace(n, x) for n, x in (("b", [1.0]), ("a", [1.0]), ("c", [1.1])))
    native = Pair("native", before, after, exact=False, fp32=True, controls=(control,))
    exact = replace(native, name="exact", exact=True)

    assert series(exact).points[0].envelope is None
    assert series(native).points[0].envelope == pytest.approx(0.3, rel=1e-3)


def test_the_norm_that_is_drawn_is_the_one_before_clipping() -> None:
    """A clipped norm would be a straight line; two clipped groups are one norm together."""
    run = trace("a", [1.0])

    (drawn,) = series(Pair("native", run, run, exact=False, fp32=True)).points

    assert (drawn.unclipped_before, drawn.norm_before) == (5.0, 0.5)
