"""Verify is only as good as the bugs it catches: each of these must FAIL, and say what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_migrate.verify.verdict import Kind
from tests.verify.launches import SCRIPTS, Bench, Run
from tests.verify.planted import BUGS, RESUME, Bug

PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
CASES = [
    pytest.param(bug, precision, id=f"{bug.name}-{precision}")
    for bug in BUGS
    for precision in PRECISIONS
    if precision == "bf16" or not bug.bf16_only
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("planted")
    checkpoint = _checkpoint(folder / "first half")
    return Bench(folder / "runs", _runs(folder / "scripts", checkpoint))


def _checkpoint(folder: Path) -> Path:
    """A full FSDP1 checkpoint of flat parameters: its step counters are aliased in the file."""
    target = folder / "checkpoint.pt"
    args = ("--flat", "--steps", "3", "--save", str(target))
    saving = Bench(folder, [Run("save", SCRIPTS / "fsdp1.py", args, steps=10)])
    (scratch,) = saving.folder.glob("save.exact/scratch")
    return scratch / "saved" / str(target).lstrip("/")


def _runs(scripts: Path, checkpoint: Path) -> Iterator[Run]:
    def real(args: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(checkpoint) if arg == "CHECKPOINT" else arg for arg in args)

    for precision, extra in PRECISIONS.items():
        for args in {bug.args for bug in BUGS}:
            flat = ("--flat",) if args == RESUME else ()
            baseline = (*real(args), *flat, *extra)
            yield Run(label("baseline", args, precision), SCRIPTS / "fsdp1.py", baseline)
            yield Run(
                label("correct", args, precision), SCRIPTS / "fsdp2.py", (*real(args), *extra)
            )
        for bug in BUGS:
            if precision == "bf16" or not bug.bf16_only:
                script = bug.plant(scripts)
                args = (*real(bug.args), *extra)
                yield Run(label(bug.name, (), precision), script, args, lifted=False)


def label(name: str, args: tuple[str, ...], precision: str) -> str:
    return " ".join([name, *args, precision]).replace(" ", "_").replace("/", "_")


@pytest.mark.parametrize("args", sorted({bug.args for bug in BUGS}), ids=" ".join)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_script_without_a_bug_passes(
    bench: Bench, args: tuple[str, ...], precision: str
) -> None:
    """The variants differ from a script that is right, also when it resumes."""
    before, after = (label(name, args, precision) for name in ("baseline", "correct"))
    verdict = bench.parity(before, after).verdict

    assert verdict.title == "PASS (bitwise)", verdict.sentence


@pytest.mark.parametrize(("bug", "precision"), CASES)
def test_a_planted_bug_fails(bench: Bench, bug: Bug, precision: str) -> None:
    """A bug is found by the check it belongs to, and the message names it."""
    before = label("baseline", bug.args, precision)
    verdict = bench.parity(before, label(bug.name, (), precision)).verdict

    assert verdict.kind is Kind.FAIL, verdict.sentence
    assert (verdict.check, bug.says in verdict.message) == (bug.check, True), verdict.sentence
    assert verdict.finding is not None
    if bug.rank is not None:
        assert verdict.finding.rank == bug.rank
    if bug.tensor is not None:
        assert verdict.finding.tensor == bug.tensor
