"""Raw optimizer files, against what the ranks held."""

import pytest

from fsdp_migrate.checkpoint.contents import RankTree
from fsdp_migrate.checkpoint.model_layout import from_index
from fsdp_migrate.checkpoint.raw_optimizer import Known
from fsdp_migrate.checkpoint.readers import full
from fsdp_migrate.checkpoint.torch_file import read_torch_file
from fsdp_migrate.errors import OpenQuestion
from tests.checkpoint.cases import Case, cases
from tests.checkpoint.local import layout_of
from tests.checkpoint.raw import (
    full_groups,
    index_of,
    known_by_layout,
    known_by_model,
    named,
    trees,
    wrong,
)

RAW = [case for case in cases("raw_optim") if (case.path / "flat_layout.json").exists()]
VERL = [case for case in RAW if any((case.path / "sharded_rank").glob("model*"))]


@pytest.mark.parametrize("case", RAW, ids=lambda case: case.id)
def test_states_are_bit_equal_with_the_users_model(case: Case) -> None:
    """Every raw optimizer of every torch version, named by the model's layout."""
    found = named(trees(case), known_by_layout(case))
    assert wrong(found.optimizer, case) == []
    groups = full_groups(case)
    if groups is not None:
        assert [sorted(group.params) for group in found.optimizer.groups] == [
            sorted(group) for group in groups
        ]


@pytest.mark.parametrize("case", VERL, ids=lambda case: case.id)
def test_states_are_bit_equal_with_model_files_alone(case: Case) -> None:
    """As in verl's folders: no model, only the sharded model files beside the optimizer."""
    found = named(trees(case), known_by_model(case))
    assert wrong(found.optimizer, case) == []


FSDP2 = [case for case in cases("sharded_rank") if case.settings.get("fsdp2")]
REKEYED = [c for c in cases("full") if (c.path / "full/full_optim_rekeyed_param_id.pt").exists()]


@pytest.mark.parametrize("case", FSDP2, ids=lambda case: case.id)
def test_fsdp2_states_are_bit_equal_with_model_files_alone(case: Case) -> None:
    """FSDP2's own per-rank optimizer: DTensors by id."""
    found = named(trees(case, "sharded_rank"), known_by_model(case))
    assert wrong(found.optimizer, case) == []


@pytest.mark.parametrize("case", FSDP2, ids=lambda case: case.id)
def test_fsdp2_states_are_bit_equal_with_the_users_model(case: Case) -> None:
    found = named(trees(case, "sharded_rank"), Known(layout_of(case.settings)))
    assert wrong(found.optimizer, case) == []


@pytest.mark.parametrize("by", ["layout", "model"])
@pytest.mark.parametrize("case", REKEYED, ids=lambda case: case.id)
def test_a_full_optimizer_by_parameter_id_is_bit_equal(case: Case, by: str) -> None:
    """`rekey_optim_state_dict(..., PARAM_ID)`: one file, ids in the order of the plain model."""
    tree = read_torch_file(case.path / "full/full_optim_rekeyed_param_id.pt").tree
    if by == "layout":
        known = Known(layout_of(case.settings))
    else:
        contents = full.read([case.path / "full/pytorch_model_fsdp.bin"])
        known = Known(from_index(index_of(contents), "the model file"))
        if case.torch == (1, 13):
            # Its full files do not mark parameters: BatchNorm's buffers could be some.
            with pytest.raises(OpenQuestion, match="may be"):
                named([RankTree(0, tree)], known)
            return
    found = named([RankTree(0, tree)], known)
    assert wrong(found.optimizer, case) == []
