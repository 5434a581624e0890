"""A run goes on under FSDP2 where FSDP1 left it, to the last bit of every loss."""

import json
from pathlib import Path

import pytest

from tests.checkpoint.command import converted
from tests.checkpoint.ranks import run_script

WORLD = 2
KINDS = ("full", "ranks", "dcp", "local")
NAMES = [f"{wrap}-{kind}" for wrap in ("flat", "orig") for kind in KINDS]


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> tuple[list[dict], list[dict]]:
    """Each rank's losses: of FSDP1 uninterrupted, of FSDP2 from each converted checkpoint."""
    folder = tmp_path_factory.mktemp("resume")
    run_script("resume_ranks.py", WORLD, folder, "fsdp1")
    for name in NAMES:
        layout = ("--model", "tests.checkpoint.resume_ranks:Net") if "local" in name else ()
        converted(folder / name, folder / f"{name}-dcp", "dcp", "--ranks", WORLD, *layout)
    run_script("resume_ranks.py", WORLD, folder, "fsdp2", *(f"{name}-dcp" for name in NAMES))
    return tuple(
        [_losses(folder / f"{kind}-{rank}.json") for rank in range(WORLD)]
        for kind in ("fsdp1", "fsdp2")
    )


def _losses(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_losses_go_on_bit_for_bit(losses, name) -> None:
    """Eight steps after the move, no clipping: every loss of every rank is the very same."""
    uninterrupted, resumed = losses
    for rank in range(WORLD):
        expected = uninterrupted[rank][name.partition("-")[0]]
        assert len(expected) == 8
        assert resumed[rank][f"{name}-dcp"] == expected
