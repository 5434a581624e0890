"""Every layout of every torch version, read and held against what the runs themselves held."""

import pytest

from fsdp_migrate.checkpoint.load import LoadOptions, load
from fsdp_migrate.errors import Incomplete, OpenQuestion
from tests.checkpoint.saved import Saved, check_index, every_saved

SAVED = list(every_saved())
WHOLE = [saved for saved in SAVED if not saved.lost]
LOST = [saved for saved in SAVED if saved.lost]


@pytest.mark.parametrize("saved", WHOLE, ids=lambda saved: saved.id)
def test_every_value_is_what_the_ranks_held(saved: Saved) -> None:
    """Model, optimizer states and groups are bit for bit the truth, whatever the layout."""
    loaded = load(saved.source, saved.options())

    check_index(saved.case, loaded.index)
    assert bool(loaded.index.model) == saved.has_model
    assert (loaded.index.optimizer is not None) == saved.has_optimizer


@pytest.mark.parametrize("saved", LOST, ids=lambda saved: saved.id)
def test_a_nested_checkpoint_of_torch_1_13_is_refused(saved: Saved) -> None:
    """It holds rank 0's shards only; the others were never written."""
    with pytest.raises(Incomplete, match=r"1\.13"):
        load(saved.source, saved.options())


NUMBERED = [s for s in SAVED if (s.flat or s.raw) and s.model]


@pytest.mark.parametrize("saved", NUMBERED[::7], ids=lambda saved: saved.id)
def test_a_missing_fact_is_asked_for(saved: Saved) -> None:
    """Flat parameters without a layout, numbered states without a model: never guessed."""
    try:
        loaded = load(saved.source, LoadOptions(optimizer_from=saved.optimizer))
    except OpenQuestion as question:
        assert "--" in str(question) or "which" in str(question)
    else:
        check_index(saved.case, loaded.index)  # the model beside the optimizer told enough
