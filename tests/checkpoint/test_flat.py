"""Un-flattening, against what the runs themselves held."""

import json

import pytest

from tests.checkpoint.cases import Case, cases, equal, values
from tests.checkpoint.local import unflattened

LOCAL = [c for c in cases("local_rank") if (c.path / "flat_layout.json").exists()]
FLAT = [case for case in LOCAL if case.settings["strategy"] != "NO_SHARD"]


@pytest.mark.parametrize("case", FLAT, ids=lambda case: case.id)
def test_every_parameter_of_every_real_checkpoint_is_bit_equal(case: Case) -> None:
    """LOCAL files of every torch version give the parameters that the ranks held."""
    found = unflattened(case)
    truth = dict(case.truth["params"])
    for alias, first in case.truth["shared"].items():
        truth[alias] = truth[first]
    ignored = {"model.gate.scale"} if case.settings.get("ignored") else set()
    assert set(found.tensors) == set(truth) - ignored
    wrong = [name for name, t in found.tensors.items() if not equal(values(t), truth[name])]
    assert wrong == []


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
