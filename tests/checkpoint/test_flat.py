"""Un-flattening, against what the runs themselves held."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.model_layout import from_json
from fsdp_migrate.checkpoint.readers import full
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.ties import layout_with_ties
from tests.checkpoint.cases import Case, cases, equal, values
from tests.checkpoint.local import unflattened
from tests.checkpoint.raw import index_of

LOCAL = [c for c in cases("local_rank") if (c.path / "flat_layout.json").exists()]
FLAT = [case for case in LOCAL if case.settings["strategy"] != "NO_SHARD"]


DCP = [c for c in cases("local_dcp") if c.torch >= (2, 0)]  # 1.13 lost the other ranks' shards
EMITTED = [
    (case, part)
    for part, found in (("local_rank", FLAT), ("local_dcp", DCP))
    for case in found
    if (case.path / "full/pytorch_model_fsdp.bin").exists() and not case.settings.get("noncontig")
]


def check(case: Case, tensors: Mapping[str, Tensor]) -> None:
    truth = dict(case.truth["params"])
    for alias, first in case.truth["shared"].items():
        truth[alias] = truth[first]
    ignored = {"model.gate.scale"} if case.settings.get("ignored") else set()
    assert set(tensors) == set(truth) - ignored
    assert [name for name, t in tensors.items() if not equal(values(t), truth[name])] == []


@pytest.mark.parametrize("case", DCP, ids=lambda case: case.id)
def test_dcp_directories_are_bit_equal(case: Case) -> None:
    """With use_orig_params=True one rank's pieces stand under the original names: junk."""
    found = unflattened(case, part="local_dcp")
    check(case, found.tensors)
    assert found.junk == (found.tensors.keys() if case.settings["orig"] else frozenset())


@pytest.mark.parametrize(("case", "part"), EMITTED, ids=lambda value: getattr(value, "id", value))
def test_the_layout_of_a_full_checkpoint_is_enough(case: Case, part: str, tmp_path: Path) -> None:
    """As `inspect-ckpt --emit-layout` writes it: buffers uncertain, ties found by value."""
    index = index_of(full.read([case.path / "full/pytorch_model_fsdp.bin"]))
    with Gatherer() as gatherer:
        layout = layout_with_ties(index, "a full checkpoint", gatherer.read)
    file = tmp_path / "layout.json"
    file.write_text(layout.to_json())
    check(case, unflattened(case, from_json(file), part).tensors)


@pytest.mark.parametrize("case", FLAT, ids=lambda case: case.id)
def test_every_parameter_of_every_real_checkpoint_is_bit_equal(case: Case) -> None:
    """LOCAL files of every torch version give the parameters that the ranks held."""
    check(case, unflattened(case).tensors)


@pytest.mark.parametrize("case", FLAT, ids=lambda case: case.id)
def test_the_proved_layout_is_the_one_fsdp_used(case: Case) -> None:
    """Units, order, padding and alignment are those that FSDP itself reported."""
    handles = json.loads((case.path / "flat_layout.json").read_text())["flat_params"]
    found = {unit.prefix: unit for unit in unflattened(case).units}
    assert set(found) == {handle["prefix"] for handle in handles}
    for handle in handles:
        unit, expected, at = found[handle["prefix"]], [], 0
        padded = handle["is_padding_mask"] or [False] * len(handle["numels_with_padding"])
        for numel, padding in zip(handle["numels_with_padding"], padded, strict=True):
            if not padding:
                expected.append(at)
            at += numel
        assert [p.parameter.name for p in unit.placements] == handle["fqns"]
        assert [p.start for p in unit.placements] == expected
        assert unit.numel == handle["unpadded_unsharded"]
