"""What can be asked of targets, and what is refused."""

from __future__ import annotations

import pytest

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.writers import WRITERS, TargetOptions
from fsdp_migrate.errors import UsageError


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"keys": "composer"},
        {"ranks": 0},
        {"mesh": (0, 2)},
        {"mesh": (2, 2), "ranks": 3},
        {"max_shard_size": 0},
    ],
    ids=str,
)
def test_contradictions_are_refused(options):
    """Before anything is read."""
    with pytest.raises(UsageError):
        TargetOptions(**options)


def test_a_mesh_tells_the_world_size():
    """HSDP 2x4: eight ranks, parameters cut over four."""
    options = TargetOptions(mesh=(2, 4))

    assert (options.world_size, options.shards) == (8, 4)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("hf", {"ranks": 2}),
        ("torch", {"mesh": (1, 2)}),
        ("torch", {"keys": "torchtitan"}),
        ("dcp", {"device_type": "cuda"}),
        ("fsdp2", {"ranks": 2, "keys": "accelerate"}),
        ("hf", {"mesh_dim_names": ("fsdp",)}),
    ],
)
def test_an_option_without_meaning_is_refused(target, options):
    """Ignoring it would let the user believe it was obeyed."""
    (writer,) = (writer for writer in WRITERS if target == writer.NAME)

    with pytest.raises(UsageError, match=f"means nothing for --to {target}"):
        writer.plan(Index({}), TargetOptions(**options))


def test_targets_have_distinct_names():
    """The table is what --to chooses from."""
    assert [writer.NAME for writer in WRITERS] == ["dcp", "fsdp2", "hf", "torch"]
