"""Raw optimizer files, against what the ranks held."""

import pytest

from tests.checkpoint.cases import Case, cases
from tests.checkpoint.raw import (
    full_groups,
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
