"""The dcp target, loaded by torch's own DCP into real FSDP2 models."""

from __future__ import annotations

import pytest
import torch

from fsdp_migrate.checkpoint.writers import TargetOptions
from fsdp_migrate.checkpoint.writers import dcp as writer
from tests.checkpoint.writer_contract import index_of, run_ranks, truth, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every key style, once with chunks by size and once cut for 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("dcp")
    values = truth()
    torch.save(values, folder / "truth.pt")
    index = index_of(folder / "source", values)
    for keys in ("plain", "accelerate", "torchtitan"):
        for ranks in (None, 2, 3):
            plan = writer.plan(index, TargetOptions(keys=keys, ranks=ranks))
            write(plan, folder / f"{keys}-{ranks}")
    return folder


@pytest.mark.parametrize("world", [2, 3])
def test_real_fsdp2_loads_every_key_style(folder, world):
    """dcp.load gives back every value, whatever number of ranks it was cut for."""
    checks = [
        f"{keys}={keys}-{ranks}"
        for keys in ("plain", "accelerate", "torchtitan")
        for ranks in (None, 2, 3)
    ]

    run_ranks(world, folder, *checks)
