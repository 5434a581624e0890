"""What trainers put around a model: nested roots, several models, schedulers, counters."""

import argparse
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp_migrate.checkpoint.compare import compare
from fsdp_migrate.checkpoint.convert import Request, convert
from fsdp_migrate.checkpoint.load import LoadOptions, load
from fsdp_migrate.checkpoint.names import NameOptions
from fsdp_migrate.errors import OpenQuestion, UnknownFormat


@pytest.fixture
def trained():
    """A model, its optimizer after two steps, and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def by_name(model, optimizer, prefix=""):
    names = [prefix + name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    return {
        "state": {names[number]: entries for number, entries in saved["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def same_state(optimizer, loaded):
    expected = optimizer.state_dict()["state"]
    return all(
        torch.equal(value, list(loaded["state"].values())[number][key])
        for number, entries in expected.items()
        for key, value in entries.items()
    )


def test_a_scheduler_and_counters_go_where_dcp_load_finds_them(trained, tmp_path):
    """Resuming needs more than the weights: what is plain and beside them is carried."""
    model, optimizer, scheduler = trained
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 3,
        "rng_state": torch.get_rng_state(),
        "args": argparse.Namespace(lr=0.1),
    }
    torch.save(content, tmp_path / "checkpoint.pt")

    converted = convert(Request(tmp_path / "checkpoint.pt", tmp_path / "dcp", "dcp"))

    found = {"lr_scheduler": dict.fromkeys(scheduler.state_dict()), "epoch": 0}
    found["rng_state"] = torch.zeros_like(content["rng_state"])
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["lr_scheduler"] == scheduler.state_dict()
    assert found["epoch"] == 3
    assert torch.equal(found["rng_state"], content["rng_state"])
    assert any("args (argparse.Namespace)" in note for note in converted.prepared.notes)


def test_lightning_numbers_its_optimizer_states(trained, tmp_path):
    """Names come from the model beside; its prefix can be taken off both."""
    model, optimizer, _ = trained
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {
        "state_dict": state,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 2}],
        "epoch": 1,
    }
    torch.save(content, tmp_path / "epoch=1.ckpt")

    request = Request(
        tmp_path / "epoch=1.ckpt", tmp_path / "out.pt", "torch", names=NameOptions("model.")
    )
    convert(request)

    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(loaded["model"]) == list(model.state_dict())
    assert list(loaded["optim"]["state"]) == [name for name, _ in model.named_parameters()]
    assert same_state(optimizer, loaded["optim"])
    assert loaded["lr_schedulers"] == [{"last_epoch": 2}]


def test_composer_nests_model_and_optimizer_below_state(trained, tmp_path):
    model, optimizer, _ = trained
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {
        "state": {"model": state, "optimizers": {"AdamW": by_name(model, optimizer, "model.")}},
        "rng": [{"cuda": torch.zeros(4, dtype=torch.uint8)}],
    }
    with warnings.catch_warnings(action="ignore"):
        dcp.save(content, checkpoint_id=tmp_path / "ep0-ba2", no_dist=True)

    convert(Request(tmp_path / "ep0-ba2", tmp_path / "out.pt", "torch"))

    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in state.items())
    assert same_state(optimizer, loaded["optim"])


def test_an_ema_copy_beside_the_model_is_named_and_can_be_chosen(trained, tmp_path):
    model, _, _ = trained
    ema = {name: value * 2 for name, value in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "ema": ema}, tmp_path / "both.pt")

    plain = load(tmp_path / "both.pt", LoadOptions()).index
    chosen = load(tmp_path / "both.pt", LoadOptions(model_root="ema")).index

    assert any("tensors at ema" in note for note in plain.notes)
    differences = compare(plain, chosen).differences
    assert {difference.kind for difference in differences} == {"value"}
    assert len(differences) == len(ema)


def test_two_models_of_equal_standing_are_asked_about(trained, tmp_path):
    model, _, _ = trained
    content = {"policy": model.state_dict(), "critic": model.state_dict()}
    torch.save(content, tmp_path / "both.pt")

    with pytest.raises(OpenQuestion, match=r"policy, critic.*--model-root"):
        load(tmp_path / "both.pt", LoadOptions())


def test_numpy_numbers_in_param_groups_are_plain_numbers(trained, tmp_path):
    """Schedulers written with numpy leave their scalars as learning rates."""
    model, optimizer, _ = trained
    named = by_name(model, optimizer)
    named["param_groups"][0]["lr"] = np.float64(0.1)
    torch.save({"model": model.state_dict(), "optimizer": named}, tmp_path / "numpy.pt")

    index = load(tmp_path / "numpy.pt", LoadOptions()).index

    assert index.optimizer.groups[0].options["lr"] == 0.1
    assert type(index.optimizer.groups[0].options["lr"]) is float


def test_a_pickled_module_is_explained(trained, tmp_path):
    torch.save(trained[0], tmp_path / "module.pt")

    with pytest.raises(UnknownFormat, match=r"save model.state_dict\(\)"):
        load(tmp_path / "module.pt", LoadOptions())
