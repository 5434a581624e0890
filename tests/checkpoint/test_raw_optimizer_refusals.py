"""Raw optimizers that contradict themselves or leave a choice are refused; odd ones are kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_migrate.checkpoint.contents import RankTree
from fsdp_migrate.checkpoint.flat_layout import writer_of
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.model_layout import ModelLayout, Parameter
from fsdp_migrate.checkpoint.raw_optimizer import Known, Named, wrap_prefixes
from fsdp_migrate.checkpoint.replicas import check
from fsdp_migrate.checkpoint.tensors import Extent, Tensor
from fsdp_migrate.checkpoint.torch_file import read_torch_file
from fsdp_migrate.errors import Incomplete, OpenQuestion, SourceError
from tests.checkpoint.cases import Case, cases, values
from tests.checkpoint.local import layout_of
from tests.checkpoint.raw import known_by_layout, named, trees

RAW = {case.id: case for case in cases("raw_optim")}
GROUPS = [case for case in RAW.values() if case.settings.get("groups")]
HYBRID = [case for case in RAW.values() if "hybrid" in case.name]
FROZEN = [case for case in RAW.values() if case.settings.get("frozen")]


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.id)
def test_groups_that_sizes_do_not_tell_are_asked_for(case: Case) -> None:
    """BatchNorm's weight is in the first group, norms of the same size are in the second."""
    layout = layout_of({**case.settings, "groups": 0})
    with pytest.raises(OpenQuestion, match="may be"):
        named(trees(case), replace(known_by_layout(case), layout=layout))


@pytest.mark.parametrize("case", HYBRID, ids=lambda case: case.id)
def test_replicas_of_other_shard_groups_are_given_to_be_compared(case: Case) -> None:
    found = named(trees(case), known_by_layout(case))
    names = {replica.path[0] for replica in found.replicas}
    assert {f"{name}.exp_avg" for name in found.optimizer.state} <= names
    assert check(found.replicas, {}) == []


@pytest.mark.parametrize("case", FROZEN, ids=lambda case: case.id)
def test_frozen_parameters_are_reported(case: Case) -> None:
    found = named(trees(case), known_by_layout(case))
    assert any("3 parameters are not in the optimizer" in note for note in found.notes)


@pytest.mark.parametrize("case", list(RAW.values())[:8], ids=lambda case: case.id)
def test_another_model_is_refused(case: Case) -> None:
    layout = layout_of(case.settings)
    fewer = ModelLayout(tuple(p for p in layout if "layers.1" not in p.name))
    prefixes = [p for p in known_by_layout(case).prefixes or () if "layers.1" not in p]
    with pytest.raises(SourceError):
        named(trees(case), Known(fewer, prefixes))


def two_layers() -> ModelLayout:
    shapes = {"a.weight": (4, 2), "a.bias": (3,), "b.weight": (4, 2), "b.bias": (3,)}
    return ModelLayout(tuple(Parameter(name, shape) for name, shape in shapes.items()))


def saved(folder: Path, ranks: Sequence[dict[str, Any]]) -> list[RankTree]:
    found = []
    for rank, tree in enumerate(ranks):
        path = folder / f"optim_rank{rank}.pt"
        torch.save(tree, path)
        found.append(RankTree(rank, read_torch_file(path).tree))
    return found


def adam(*shapes: tuple[int, ...], step: float = 3, **group: Any) -> dict[str, Any]:
    state = {
        at: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full(shape, at + 1.0),
            "exp_avg_sq": torch.full(shape, at + 0.5),
        }
        for at, shape in enumerate(shapes)
    }
    group = {"lr": 0.1, **group}
    return {"state": state, "param_groups": [{**group, "params": list(range(len(shapes)))}]}


WHOLE = ((4, 2), (3,), (4, 2), (3,))


def solve(folder: Path, ranks: Sequence[dict[str, Any]], **known: Any) -> Named:
    return named(saved(folder, ranks), Known(two_layers(), **{"prefixes": [""], **known}))


def test_whole_states_of_one_file(tmp_path: Path) -> None:
    found = solve(tmp_path, [adam(*WHOLE, weight_decay=0.5)])
    assert list(found.optimizer.state) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    (group,) = found.optimizer.groups
    assert group.params == ("a.weight", "a.bias", "b.weight", "b.bias")
    assert group.options == {"lr": 0.1, "weight_decay": 0.5}


def test_flat_states_carry_their_step_to_every_parameter(tmp_path: Path) -> None:
    """22 elements on 4 ranks: shards of 6, two zeros at the end."""
    ranks = [adam((6,)) for _ in range(4)]
    for entries in ranks[3]["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entries[key][4:] = 0
    found = solve(tmp_path, ranks)
    for states in found.optimizer.state.values():
        assert isinstance(states["step"], Tensor)
        assert values(states["step"]).item() == 3
    assert len(found.optimizer.state) == 4


def test_padding_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="should be padding, and are not zero"):
        solve(tmp_path, [adam((6,)) for _ in range(4)], group_size=4)


def test_a_step_that_differs_between_ranks_is_left_to_the_comparison(tmp_path: Path) -> None:
    """Copies are compared where all replicas are: there it is an error."""
    found = solve(tmp_path, [adam((11,)), adam((11,), step=4)])
    with pytest.raises(Incomplete, match="step: its copies"):
        check(found.replicas, {})


def test_param_groups_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match=r"lr is 0\.1 on rank 0 and 0\.2"):
        solve(tmp_path, [adam((11,)), adam((11,), lr=0.2)])


def test_a_rank_without_its_shard_is_refused(tmp_path: Path) -> None:
    second = adam((11,))
    del second["state"][0]["exp_avg_sq"]
    with pytest.raises(Incomplete, match="exp_avg_sq is missing on ranks \\[1\\]"):
        solve(tmp_path, [adam((11,)), second])


def test_an_id_without_a_group_is_refused(tmp_path: Path) -> None:
    tree = adam(*WHOLE)
    tree["param_groups"][0]["params"] = [0, 1, 2]
    with pytest.raises(Incomplete, match="id 3, which is in no param group"):
        solve(tmp_path, [tree])


def test_names_of_the_optimizers_own_are_used(tmp_path: Path) -> None:
    """torch 2.6 keeps names that it was given, wrapper segments included; any order will do."""
    names = ["b.weight", "b.bias", "_fsdp_wrapped_module.a.weight", "a.bias"]
    found = solve(tmp_path, [adam(*WHOLE, param_names=names)])
    (group,) = found.optimizer.groups
    assert group.params == ("b.weight", "b.bias", "a.weight", "a.bias")
    assert group.options["param_names"] == list(group.params)
    assert values(found.optimizer.state["b.weight"]["exp_avg"])[0, 0] == 1  # type: ignore[arg-type]


def test_one_frozen_layer_of_two_alike_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OpenQuestion, match=r"id 0 may be (a|b)\.weight or (a|b)\.weight"):
        solve(tmp_path, [adam((4, 2), (3,))])


def test_a_layout_that_knows_what_is_frozen_answers_that(tmp_path: Path) -> None:
    layout = ModelLayout(
        tuple(Parameter(p.name, p.shape, trainable=p.name > "b") for p in two_layers())
    )
    found = named(saved(tmp_path, [adam((4, 2), (3,))]), Known(layout, [""]))
    assert list(found.optimizer.state) == ["b.weight", "b.bias"]


def test_a_frozen_parameter_in_the_optimizer_has_a_place_and_no_state(tmp_path: Path) -> None:
    tree = adam(*WHOLE)
    del tree["state"][1]
    found = solve(tmp_path, [tree])
    assert "a.bias" not in found.optimizer.state
    assert "a.bias" in found.optimizer.groups[0].params


def test_empty_groups_and_unknown_keys_are_kept(tmp_path: Path) -> None:
    tree = adam(*WHOLE, odd={"key": [1, None]})
    tree["param_groups"].append({"params": [], "lr": 0.7})
    groups = solve(tmp_path, [tree]).optimizer.groups
    assert groups[0].options["odd"] == {"key": [1, None]}
    assert (groups[1].params, groups[1].options) == ((), {"lr": 0.7})


def test_plain_python_states_are_kept(tmp_path: Path) -> None:
    """torch before 1.12 and hand-written optimizers have integer steps."""
    tree = adam(*WHOLE)
    for entries in tree["state"].values():
        entries["step"] = 7
        entries["extra"] = None
    states = solve(tmp_path, [tree]).optimizer.state["b.bias"]
    assert (states["step"], states["extra"]) == (7, None)


def test_factored_states_are_kept_whole(tmp_path: Path) -> None:
    """Adafactor keeps rows and columns; without sharding that is a parameter's state like any."""
    tree = adam(*WHOLE)
    for number in (0, 2):
        tree["state"][number] = {
            "step": 3, "exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(2),
        }  # fmt: skip
    states = solve(tmp_path, [tree]).optimizer.state["b.weight"]
    assert states["exp_avg_sq_row"].shape == (4,)  # type: ignore[union-attr]


def test_quantised_blocks_of_a_flat_parameter_are_refused(tmp_path: Path) -> None:
    """A block's scale belongs to several parameters at once."""
    ranks = [adam((11,)) for _ in range(2)]
    for tree in ranks:
        tree["state"][0]["absmax1"] = torch.ones(3)
    with pytest.raises(SourceError, match="fit in no way"):
        solve(tmp_path, ranks)


def test_units_that_nothing_tells_are_found_by_sizes(tmp_path: Path) -> None:
    names = [f"layers.{at}.{name}" for at in range(3) for name in ("w", "b")]
    layout = ModelLayout(
        (Parameter("embed", (7, 2)), *(Parameter(n, (5,) if n[-1] == "w" else (3,)) for n in names))
    )
    found = named(saved(tmp_path, [adam((7,), (4,), (4,), (4,)) for _ in range(2)]), Known(layout))
    assert list(found.optimizer.state) == ["embed", *names]


def test_shard_groups_are_found_by_sizes(tmp_path: Path) -> None:
    """Four ranks that hold 11 of 22 elements are two replicas of two shards."""
    found = solve(tmp_path, [adam((11,)) for _ in range(4)])
    assert len(found.replicas) == 2 * 2 + 3  # two states of two ranks, the step of three
    with Gatherer() as gatherer:
        assert gatherer.read(found.optimizer.state["a.weight"]["exp_avg"])  # type: ignore[arg-type]


def test_wrap_prefixes_come_from_module_names() -> None:
    paths = [
        "",
        "_fsdp_wrapped_module",
        "_fsdp_wrapped_module._fpw_module",
        "_fsdp_wrapped_module._fpw_module.layers.0",
        "_fsdp_wrapped_module._fpw_module.layers.0._fsdp_wrapped_module",
        "_fsdp_wrapped_module._fpw_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module",
    ]
    assert wrap_prefixes(paths) == ["", "layers.0"]
    assert wrap_prefixes(["", "layers"]) is None
    below = ["", "_fsdp_wrapped_module", "_fsdp_wrapped_module.module",
             "_fsdp_wrapped_module.module.a._fsdp_wrapped_module"]  # fmt: skip
    assert wrap_prefixes(below) == ["", "a"]


def test_writers_of_every_mark_are_known() -> None:
    for mark in ("<=2.0", ">=2.1", ">2.6", "<2.4", ">=2.4", ""):
        assert writer_of(mark)


def in_file(folder: Path, name: str, numbers: torch.Tensor) -> Tensor:
    path = folder / name
    path.write_bytes(numbers.numpy().tobytes())
    extent = Extent(0, numbers.numel(), path, 0)
    return Tensor(name, "float32", tuple(numbers.shape), (extent,))


@pytest.mark.parametrize("same", [True, False])
def test_a_tie_is_found_in_the_models_values(tmp_path: Path, same: bool) -> None:
    """FSDP saves a shared parameter under both names and optimizes it once."""
    numbers = torch.arange(8.0).view(4, 2)
    model = {
        "a.weight": in_file(tmp_path, "a.weight", numbers),
        "a.bias": in_file(tmp_path, "a.bias", torch.zeros(3)),
        "b.weight": in_file(tmp_path, "b.weight", numbers if same else numbers + 1),
        "b.bias": in_file(tmp_path, "b.bias", torch.zeros(3)),
    }
    ranks = [adam((7,)), adam((7,))]
    if same:
        found = solve(tmp_path, ranks, tensors=model)
        assert list(found.optimizer.state) == ["a.weight", "a.bias", "b.bias"]
    else:
        with pytest.raises(Incomplete):
            solve(tmp_path, ranks, tensors=model)
