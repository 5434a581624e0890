"""Runs that prove nothing about a migration are INCONCLUSIVE, however well they agree."""

from __future__ import annotations

import pytest

from fsdp_migrate.verify.verdict import Kind
from tests.verify.launches import SCRIPTS, Bench, Run

CASES = {
    "both DDP": ("ddp", "ddp", "the first run has no FSDP1 module: it fell back to Distributed"),
    "both unsharded": ("unsharded", "unsharded", "the first run has no FSDP1 module"),
    "second DDP": ("fsdp1", "ddp", "the second run has no FSDPModule: it fell back to Distributed"),
    "second still FSDP1": ("fsdp1", "fsdp1", "the second run has no FSDPModule: it is an FSDP1"),
    "first already FSDP2": ("fsdp2", "fsdp2", "the first run has no FSDP1 module: it is an FSDP2"),
    "no steps": ("no steps 1", "no steps 2", "the first run made no optimizer step"),
    "no backward": ("no backward 1", "no backward 2", "the first run never called backward"),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    idle = SCRIPTS / "idle.py"
    runs = [Run(name, SCRIPTS / f"{name}.py") for name in ("fsdp1", "fsdp2", "ddp", "unsharded")]
    for version in ("1", "2"):
        flag = () if version == "1" else ("--fsdp2",)
        runs.append(Run(f"no steps {version}", idle, (*flag, "--backward")))
        runs.append(Run(f"no backward {version}", idle, (*flag, "--step")))
    return Bench(tmp_path_factory.mktemp("vacuous"), runs)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_proves_nothing_is_inconclusive(bench: Bench, case: str) -> None:
    """Equal losses of two runs without FSDP must never pass."""
    before, after, says = CASES[case]
    verdict = bench.parity(before, after).verdict

    assert verdict.kind is Kind.INCONCLUSIVE, verdict.sentence
    assert says in verdict.message
