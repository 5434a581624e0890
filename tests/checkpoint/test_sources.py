"""Every layout of every torch version, read and held against what the runs themselves held."""

import pytest

from fsdp_migrate.checkpoint.load import load
from fsdp_migrate.errors import Incomplete
from tests.checkpoint.saved import Saved, check_index, every_saved

SAVED = list(every_saved())
WHOLE = [saved for saved in SAVED if not saved.lost and not saved.flat]
LOST = [saved for saved in SAVED if saved.lost]


@pytest.mark.parametrize("saved", WHOLE, ids=lambda saved: saved.id)
def test_every_value_is_what_the_ranks_held(saved: Saved) -> None:
    """Model, optimizer states and groups are bit for bit the truth, whatever the layout."""
    loaded = load(saved.source, saved.options())

    check_index(saved.case, loaded.index)


@pytest.mark.parametrize("saved", WHOLE, ids=lambda saved: saved.id)
def test_nothing_is_missing_without_a_word(saved: Saved) -> None:
    """What a layout holds beyond a model (an optimizer) is found, not only what is easy."""
    index = load(saved.source, saved.options()).index

    assert bool(index.model) == (saved.kind != "ranks-optimizer")
    bare = saved.kind == "dcp_toplevel" or (saved.kind == "full" and saved.optimizer is None)
    assert (index.optimizer is not None) != bare


@pytest.mark.parametrize("saved", LOST, ids=lambda saved: saved.id)
def test_a_nested_checkpoint_of_torch_1_13_is_refused(saved: Saved) -> None:
    """It holds rank 0's shards only; the others were never written."""
    with pytest.raises(Incomplete, match=r"1\.13"):
        load(saved.source, saved.options())
