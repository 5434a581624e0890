"""The program that writes the fixtures, under the torch that is installed."""

import json
import os
import subprocess
import sys

import pytest
import torch

from fsdp_migrate.checkpoint.load import load
from tests.checkpoint.cases import ARCHIVE, Case, cases
from tests.checkpoint.saved import check_index, saved_by

KINDS = {"full", "ranks", "dcp", "dcp_toplevel", "nested", "nested-ranks", "nested_dcp"}
KINDS |= {"local_rank", "local_dcp", "local+raw", "dcp_get_state_dict"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[Case]:
    """One case of FSDP1 and one of FSDP2, made now."""
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-m", "make_checkpoints", folder, "^(w2_full_block_orig|fsdp2_w2)$"]
    env = os.environ | {"PYTHONPATH": str(ARCHIVE.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return [Case(path.parent) for path in sorted(folder.glob("*/*/case.json"))]


def test_every_layout_is_made_and_holds_the_truth(made) -> None:
    """Nothing is refused, and what was saved is what the ranks held."""
    kinds = set()
    for case in made:
        record = json.loads((case.path / "case.json").read_text())
        assert [k for k, v in record["status"].items() if isinstance(v, str) and v != "ok"] == []
        for saved in saved_by(case):
            kinds.add(saved.kind)
            check_index(case, load(saved.source, saved.options()).index)
    assert kinds >= KINDS


def test_fsdp_itself_agrees_with_the_truth(made) -> None:
    """`summon_full_params` gives the parameters that were gathered by hand."""
    for case in made:
        record = json.loads((case.path / "case.json").read_text())
        if not case.settings["fsdp2"]:
            found = record["status"]["truth_vs_summon"]
            assert found == {"unequal": [], "name_diff": []}


def test_the_archive_has_every_torch_version() -> None:
    """And none that is not a real run's."""
    versions = {case.path.parent.name for case in cases()}
    assert versions == {"1.13.1", "2.0.1", "2.1.2", "2.3.1", "2.6.0", "2.13.0", "2.15.0"}
    assert ARCHIVE.stat().st_size < 2_000_000
    assert all(torch.is_tensor(v) for case in cases() for v in case.truth["params"].values())
