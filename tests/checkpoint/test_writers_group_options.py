"""Options filled into param groups, against the optimizers of the torch that is installed."""

from __future__ import annotations

import pytest
import torch

from fsdp_migrate.checkpoint.index import Group, Optimizer
from fsdp_migrate.checkpoint.writers.group_options import filled

FILLED = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
KNOWN = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adadelta, {}),
]


def options_of(kind, arguments) -> dict:
    (group,) = kind([torch.nn.Parameter(torch.zeros(1))], **arguments).state_dict()["param_groups"]
    return {key: value for key, value in group.items() if key != "params"}


@pytest.mark.parametrize(
    ("kind", "arguments"), KNOWN, ids=lambda value: getattr(value, "__name__", "")
)
def test_all_that_is_asked_for_is_there(kind, arguments):
    """An optimizer as an old torch saved it gets every option that the new one has."""
    now = options_of(kind, arguments)
    old = {key: value for key, value in now.items() if key not in FILLED}
    optimizer, notes = filled(Optimizer({}, (Group(("a",), old),)))
    (group,) = optimizer.groups

    assert set(group.options) >= set(now)
    assert {key: group.options[key] for key in old} == old
    assert len(notes) == 1 and "filled in" in notes[0]


@pytest.mark.parametrize(
    ("kind", "arguments"), KNOWN, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_values_are_torchs_own(kind, arguments):
    """Loading the filled group and loading the old group leave the optimizer in the same state."""
    now = options_of(kind, arguments)
    old = {key: value for key, value in now.items() if key not in FILLED}
    (group,) = filled(Optimizer({}, (Group(("a",), old),)))[0].groups
    loaded = []
    for options in (old, group.options):
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **arguments)
        optimizer.load_state_dict({"state": {}, "param_groups": [{**options, "params": [0]}]})
        loaded.append(optimizer.state_dict()["param_groups"][0])

    assert {key: loaded[1][key] for key in loaded[0]} == loaded[0]


def test_options_of_the_user_do_not_hide_the_optimizer():
    """A name or a scale beside all of torch's options; with few of those, it could be another's."""
    adam = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    recent = {"maximize": False, "foreach": None, "differentiable": False}
    known, _ = filled(Optimizer({}, (Group((), {**adam, **recent, "layer": 3}),)))
    unknown, notes = filled(Optimizer({}, (Group((), {**adam, "block_wise": True}),)))

    assert "decoupled_weight_decay" in known.groups[0].options
    assert unknown.groups[0].options == {**adam, "block_wise": True}
    assert "no option was filled in" in notes[0]


def test_nothing_is_said_where_nothing_is_missing():
    """A checkpoint of today's torch stays as it is."""
    group = Group(("a",), options_of(torch.optim.AdamW, {}))

    assert filled(Optimizer({}, (group,))) == (Optimizer({}, (group,)), ())
