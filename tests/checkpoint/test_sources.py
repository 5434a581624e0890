"""Every layout of every torch version, read and held against what the runs themselves held."""

import pytest

from fsdp_migrate.checkpoint.load import load
from fsdp_migrate.errors import Incomplete
from tests.checkpoint.saved import Saved, check_index, every_saved

SAVED = list(every_saved())
WHOLE = [saved for saved in SAVED if not (saved.lost or saved.flat or saved.raw)]
LOST = [saved for saved in SAVED if saved.lost]


@pytest.mark.parametrize("saved", WHOLE, ids=lambda saved: saved.id)
def test_every_value_is_what_the_ranks_held(saved: Saved) -> None:
    """Model, optimizer states and groups are bit for bit the truth, whatever the layout."""
    loaded = load(saved.source, saved.options())

    check_index(saved.case, loaded.index)
    bare = saved.kind in ("dcp_toplevel", "ranks-model") or (
        saved.kind == "full" and saved.optimizer is None
    )
    assert bool(loaded.index.model) == (saved.kind != "ranks-optimizer")
    assert (loaded.index.optimizer is None) == bare


@pytest.mark.parametrize("saved", LOST, ids=lambda saved: saved.id)
def test_a_nested_checkpoint_of_torch_1_13_is_refused(saved: Saved) -> None:
    """It holds rank 0's shards only; the others were never written."""
    with pytest.raises(Incomplete, match=r"1\.13"):
        load(saved.source, saved.options())
