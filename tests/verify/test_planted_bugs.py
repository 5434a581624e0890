"""Verify is only as good as the bugs it catches: each of these must FAIL, and say what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_migrate.verify.verdict import Kind
from tests.verify.launches import SCRIPTS, Bench, Run
from tests.verify.planted import BUGS, Bug

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
    return Bench(folder / "runs", _runs(folder / "scripts"))


def _runs(scripts: Path) -> Iterator[Run]:
    for precision, args in PRECISIONS.items():
        yield Run(f"baseline-{precision}", SCRIPTS / "fsdp1.py", args, first=True)
        yield Run(f"correct-{precision}", SCRIPTS / "fsdp2.py", args)
        for bug in BUGS:
            if precision == "bf16" or not bug.bf16_only:
                yield Run(f"{bug.name}-{precision}", bug.plant(scripts), args)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_script_without_a_bug_passes(bench: Bench, precision: str) -> None:
    """The variants differ from a script that is right."""
    verdict = bench.parity(f"baseline-{precision}", f"correct-{precision}").verdict

    assert verdict.title == "PASS (bitwise)", verdict.sentence


@pytest.mark.parametrize(("bug", "precision"), CASES)
def test_a_planted_bug_fails(bench: Bench, bug: Bug, precision: str) -> None:
    """A bug is found by the check it belongs to, and the message names it."""
    verdict = bench.parity(f"baseline-{precision}", f"{bug.name}-{precision}").verdict

    assert verdict.kind is Kind.FAIL, verdict.sentence
    assert (verdict.check, bug.says in verdict.message) == (bug.check, True), verdict.sentence
    assert verdict.finding is not None
    if bug.rank is not None:
        assert verdict.finding.rank == bug.rank
    if bug.tensor is not None:
        assert verdict.finding.tensor == bug.tensor
