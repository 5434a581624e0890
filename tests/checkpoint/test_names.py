"""Names on their way: wrappers, renames, selections, clashes; model and optimizer alike."""

import pytest
import torch
from torch import nn

from fsdp_migrate.checkpoint.load import LoadOptions, load
from tests.checkpoint.cases import equal, values
from tests.checkpoint.command import converted, refused

NAMES = ["embed.weight", "layers.0.mlp.up.weight", "layers.0.mlp.up.bias", "head.weight"]
WRAPPED = {
    "_fsdp_wrapped_module.{}": "a root unit",
    "_fsdp_wrapped_module._fpw_module.{}": "torch 1.13",
    "_forward_module.{}": "Lightning Fabric",
    "_orig_mod.{}": "torch.compile",
    "module.{}": "DDP",
    "module._fsdp_wrapped_module.module.{}": "DDP twice around FSDP",
}


def checkpoint(path, naming=lambda name: name, optimizer_naming=None):
    """A model and its AdamW, each keyed by what `naming` makes of the names."""
    torch.manual_seed(0)
    model = {name: torch.randn(3, 2) for name in NAMES}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": torch.randn(3, 2)} for name in NAMES[:-1]}
    of = optimizer_naming or naming
    groups = [
        {"lr": 0.1, "initial_lr": 0.2, "params": [of(n) for n in NAMES[:2]], "betas": (0.9, 0.95)},
        {"lr": 0.3, "params": [], "betas": (0.9, 0.95)},
        {"lr": 0.4, "params": [of(n) for n in NAMES[2:]], "my_key": [1, "two"]},
    ]
    optim = {"state": {of(n): s for n, s in state.items()}, "param_groups": groups}
    torch.save({"model": {naming(n): t for n, t in model.items()}, "optim": optim}, path)
    return model, state


@pytest.mark.parametrize("pattern", WRAPPED, ids=WRAPPED.values())
@pytest.mark.parametrize("optimizer", ["wrapped too", "clean"])
def test_wrappers_are_taken_off_the_model_and_the_optimizer(pattern, optimizer, tmp_path) -> None:
    """Each for itself: torch.compile is in the names of the one and not of the other."""
    model, state = checkpoint(
        tmp_path / "c.pt",
        pattern.format,
        None if optimizer == "wrapped too" else lambda name: name,
    )

    index = load(tmp_path / "c.pt", LoadOptions()).index
    assert set(index.model) == set(model)
    assert index.optimizer is not None
    assert set(index.optimizer.state) == set(state)
    assert [list(group.params) for group in index.optimizer.groups] == [NAMES[:2], [], NAMES[2:]]


@pytest.mark.parametrize(
    "wrapper", ["_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"]
)
def test_wrappers_in_the_middle_are_whole_segments(wrapper, tmp_path) -> None:
    """`layers.0._orig_mod.mlp`, but never a part of a longer name."""
    odd = f"my{wrapper}.weight"
    torch.save({f"layers.0.{wrapper}.w": torch.ones(2), odd: torch.ones(2)}, tmp_path / "c.pt")

    assert set(load(tmp_path / "c.pt", LoadOptions()).index.model) == {"layers.0.w", odd}


def test_module_stays_where_not_every_name_has_it(tmp_path) -> None:
    """A model may have a submodule of that name."""
    torch.save({"module.w": torch.ones(2), "head.w": torch.ones(2)}, tmp_path / "c.pt")

    assert set(load(tmp_path / "c.pt", LoadOptions()).index.model) == {"module.w", "head.w"}


def test_names_that_meet_without_their_wrappers_are_refused(tmp_path) -> None:
    """Neither is dropped for the other."""
    torch.save({"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}, tmp_path / "c.pt")

    message = refused(3, "convert-ckpt", tmp_path / "c.pt", tmp_path / "o", "--to", "hf")
    assert "_orig_mod.w" in message


def renamed(source, folder, *arguments):
    return torch.load(converted(source, folder / "o.pt", "torch", *arguments), weights_only=True)


def test_renames_hold_for_model_states_and_groups(tmp_path) -> None:
    """In the order given, with groups of the pattern."""
    model, state = checkpoint(tmp_path / "c.pt")
    rules = [r"^layers\.(\d+)\.=h.\1.", "mlp=ffn", r"^(?!h\.)=top."]

    found = renamed(tmp_path / "c.pt", tmp_path, *(w for rule in rules for w in ("--rename", rule)))
    new = dict(
        zip(
            NAMES,
            ["top.embed.weight", "h.0.ffn.up.weight", "h.0.ffn.up.bias", "top.head.weight"],
            strict=True,
        )
    )
    assert all(equal(found["model"][new[name]], value) for name, value in model.items())
    assert set(found["optim"]["state"]) == {new[name] for name in state}
    groups = found["optim"]["param_groups"]
    assert [g["params"] for g in groups] == [
        [new[n] for n in g] for g in (NAMES[:2], [], NAMES[2:])
    ]
    assert groups[0]["initial_lr"] == 0.2 and groups[2]["my_key"] == [1, "two"]


def test_select_and_strip_prefix_hold_for_all_three(tmp_path) -> None:
    """What is not selected is not in the groups either."""
    checkpoint(tmp_path / "c.pt", "net.{}".format)

    found = renamed(tmp_path / "c.pt", tmp_path, "--strip-prefix", "net.", "--select", "layers.")
    assert list(found["model"]) == NAMES[1:3]
    assert list(found["optim"]["state"]) == NAMES[1:3]
    assert [g["params"] for g in found["optim"]["param_groups"]] == [NAMES[1:2], [], NAMES[2:3]]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (3, ["--rename", ".*=same"]),
        (2, ["--rename", "no equals sign"]),
        (2, ["--rename", "(=x"]),
        (2, ["--rename", r"a=\9"]),
        (2, ["--rename", "^.*$="]),
        (2, ["--strip-prefix", "other."]),
        (2, ["--select", "nothing"]),
        (2, ["--to", "nonsense"]),
        (2, ["--dtype", "int8"]),
        (2, ["--ranks", "0"]),
        (2, ["--keys", "other"]),
        (2, ["--max-shard-size", "many"]),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(code, arguments, tmp_path) -> None:
    """Before anything is written."""
    checkpoint(tmp_path / "c.pt")

    refused(code, "convert-ckpt", tmp_path / "c.pt", tmp_path / "o", "--to", "dcp", *arguments)
    assert not (tmp_path / "o").exists()


def test_a_cast_touches_parameters_alone(tmp_path) -> None:
    """Never the optimizer, integers, bools, or buffers that are known as such."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    tree = dict(net.state_dict()) | {"flag": torch.tensor([True]), "ids": torch.arange(3)}
    state = {"0.weight": {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 2)}}
    optim = {"state": state, "param_groups": [{"lr": 1.0, "params": ["0.weight"]}]}
    torch.save({"model": tree, "optim": optim}, tmp_path / "c.pt")

    found = renamed(tmp_path / "c.pt", tmp_path, "--dtype", "bfloat16")
    assert equal(found["model"]["0.weight"], tree["0.weight"].detach().to(torch.bfloat16))
    for name in ("flag", "ids", "1.num_batches_tracked"):
        assert equal(found["model"][name], tree[name])
    assert all(
        equal(found["optim"]["state"]["0.weight"][k], v) for k, v in state["0.weight"].items()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cast_rounds_as_torch_does(dtype, tmp_path) -> None:
    """Ties, infinities, NaNs, subnormals, overflow."""
    odd = [0.0, -0.0, 1e-45, 6e-8, 65504.0, 65520.0, 3.4e38, float("inf"), float("nan"), 1.00390625]
    value = torch.tensor(odd + torch.randn(999).tolist())
    torch.save({"w": value}, tmp_path / "c.pt")

    found = renamed(tmp_path / "c.pt", tmp_path, "--dtype", dtype)["model"]["w"]
    expected = value.to(getattr(torch, dtype))
    assert torch.equal(found.isnan(), expected.isnan())
    assert equal(found.nan_to_num(7), expected.nan_to_num(7))


def test_every_step_has_storage_of_its_own(tmp_path) -> None:
    """FSDP1 lets parameters of a unit share one `step`; FSDP2 would then count it several times."""
    step = torch.tensor(5.0)
    state = {name: {"step": step, "exp_avg": torch.ones(3, 2)} for name in NAMES}
    optim = {"state": state, "param_groups": [{"lr": 1.0, "params": NAMES}]}
    model = {name: torch.ones(3, 2) for name in NAMES}
    torch.save({"model": model, "optim": optim}, tmp_path / "c.pt")

    found = renamed(tmp_path / "c.pt", tmp_path)["optim"]["state"]
    assert len({entries["step"].data_ptr() for entries in found.values()}) == len(NAMES)


def test_state_of_a_parameter_that_the_model_lacks_is_refused(tmp_path) -> None:
    """The two do not belong together."""
    model, _ = checkpoint(tmp_path / "c.pt")
    del model["embed.weight"]
    torch.save(model, tmp_path / "m.pt")

    message = refused(
        3, "convert-ckpt", tmp_path / "m.pt", tmp_path / "o", "--to", "dcp",
        "--optimizer", tmp_path / "c.pt",
    )  # fmt: skip
    assert "embed.weight" in message


def test_names_with_dots_slashes_and_other_letters_survive(tmp_path) -> None:
    """A ParameterDict's keys may be anything."""
    model = {"a.b/c": torch.ones(2), "ü.λ weight": torch.ones(3), "x" * 300: torch.ones(1)}
    torch.save(model, tmp_path / "c.pt")

    dcp = converted(tmp_path / "c.pt", tmp_path / "dcp", "dcp")
    hf = converted(dcp, tmp_path / "hf", "hf")
    index = load(hf, LoadOptions()).index
    assert {name: tuple(values(t).shape) for name, t in index.model.items()} == {
        name: tuple(value.shape) for name, value in model.items()
    }
