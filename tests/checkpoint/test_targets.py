"""Real checkpoints of every version to every target, read back by the libraries that will."""

import pytest

from tests.checkpoint import read_back
from tests.checkpoint.command import converted, run
from tests.checkpoint.saved import (
    Saved,
    check_groups,
    check_model,
    check_state,
    every_saved,
    trained_names,
)

USABLE = [saved for saved in every_saved() if not saved.lost]
# The first of each layout in each version goes to every target.
FIRST = list({(s.case.torch, s.kind): s for s in reversed(USABLE)}.values())[::-1]
OTHERS = [saved for saved in USABLE if saved not in FIRST]


def check(saved: Saved, found: dict, optimizer: bool = True) -> None:
    if saved.has_model:
        check_model(saved.case, found["model"])
    assert ("optim" in found) == (optimizer and saved.has_optimizer)
    if "optim" in found:
        optim = found["optim"]
        check_state(saved.case, optim["state"])
        check_groups(saved.case, optim["param_groups"], optim["state"])


def _layout(saved: Saved) -> list[object]:
    """The options without the optimizer's."""
    words = saved.arguments()
    return words[2:] if saved.optimizer else words


@pytest.mark.parametrize("saved", FIRST, ids=lambda saved: saved.id)
def test_torch_load_reads_every_value_of_one_file(saved: Saved, tmp_path) -> None:
    """A full file of any layout of any version equals the truth, under weights_only."""
    output = converted(saved.source, tmp_path / "full.pt", "torch", *saved.arguments())

    check(saved, read_back.torch_file(output))


@pytest.mark.parametrize("saved", FIRST, ids=lambda saved: saved.id)
def test_dcp_load_reads_every_value(saved: Saved, tmp_path) -> None:
    """The dcp target equals the truth as torch's own DCP reads it, cut for three ranks."""
    output = converted(saved.source, tmp_path / "dcp", "dcp", "--ranks", 3, *saved.arguments())

    check(saved, read_back.dcp(output))


@pytest.mark.parametrize("saved", FIRST, ids=lambda saved: saved.id)
def test_safetensors_reads_every_parameter(saved: Saved, tmp_path) -> None:
    """The hf target equals the truth as safetensors reads it, in several files."""
    if not saved.has_model:
        pytest.skip("an optimizer alone has no place in a Hugging Face folder")
    output = converted(
        saved.source, tmp_path / "hf", "hf", "--max-shard-size", 5000, *_layout(saved)
    )

    check(saved, read_back.hf(output), optimizer=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", FIRST, ids=lambda saved: saved.id)
def test_torch_load_reads_every_shard_of_rank_files(saved: Saved, tmp_path) -> None:
    """The fsdp2 target: DTensors under weights_only; its optimizer is numbered, in model order."""
    if not saved.has_model:
        pytest.skip("rank files of an optimizer alone have no names")
    output = converted(saved.source, tmp_path / "out", "fsdp2", "--ranks", 3, *saved.arguments())

    found = read_back.fsdp2(output)
    check_model(saved.case, found["model"])
    assert ("optim" in found) == saved.has_optimizer
    if "optim" in found:
        names = dict(enumerate(trained_names(saved.case)))
        check_state(saved.case, {names[n]: s for n, s in found["optim"]["state"].items()})
        groups = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in found["optim"]["param_groups"]
        ]
        check_groups(saved.case, groups, {})


@pytest.mark.parametrize("saved", OTHERS[::6], ids=lambda saved: saved.id)
def test_compare_ckpt_finds_what_was_converted_the_same(saved: Saved, tmp_path) -> None:
    """A conversion, compared with its source by the other command, differs in nothing."""
    output = converted(saved.source, tmp_path / "dcp", "dcp", *saved.arguments())

    outcome = run("compare-ckpt", saved.source, output, "--no-optimizer", *_layout(saved))
    assert outcome.code == 0, outcome.out
