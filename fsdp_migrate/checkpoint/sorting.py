"""
Sort what a source holds: which values are the model, which an optimizer, which stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_migrate.checkpoint.contents import Contents, KeyPath, foreign_in, shown
from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Group, Optimizer
from fsdp_migrate.checkpoint.names import cleaned
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Corrupt, Forbidden, Incomplete, OpenQuestion, Unsupported

MODEL_NAMES = ("model", "state_dict", "model_state_dict", "module", "model_state", "weights")


@dataclass(frozen=True, slots=True)
class Sorted:
    """
    Roots are the paths of the dicts that hold a model, or an optimizer. `other_models` hold
    floating tensors too (an EMA copy), beside one that is called a model. `extras` are the rest.
    """

    model_roots: tuple[KeyPath, ...]
    other_models: tuple[KeyPath, ...]
    optimizer_roots: tuple[KeyPath, ...]
    raw_roots: tuple[KeyPath, ...]
    extras: tuple[KeyPath, ...]


def sort(contents: Contents) -> Sorted:
    optimizers = _optimizer_roots(contents.values)
    tensors: dict[KeyPath, list[KeyPath]] = {}
    extras: list[KeyPath] = []
    for path, value in contents.values.items():
        if any(_belongs(path, root) for root in optimizers):
            continue
        if isinstance(value, Tensor) and path and isinstance(path[-1], str):
            tensors.setdefault(path[:-1], []).append(path)
        else:
            extras.append(path)
    found = []
    for root, paths in tensors.items():
        # Tensors of integers alone are an RNG state or a counter.
        if any(DTYPES[contents.values[path].dtype].floating for path in paths):  # type: ignore[attr-defined]
            found.append(root)
        else:
            extras += paths
    named = [root for root in found if _named_like_model(root)] or found
    others = [root for root in found if root not in named]
    return Sorted(
        tuple(named), tuple(others), tuple(optimizers), tuple(contents.raw), tuple(extras)
    )


def choose(kind: str, roots: Iterable[KeyPath], wanted: str | None) -> KeyPath | None:
    """The one root there is, or the one the user named; `OpenQuestion` lists several."""
    found = list(roots)
    if wanted is not None:
        match = [root for root in found if shown(root) == wanted or wanted in root[-1:]]
        if len(match) != 1:
            names = ", ".join(map(shown, found)) or "none"
            raise OpenQuestion(f"no {kind} at {wanted!r}; there is: {names}")
        return match[0]
    if len(found) > 1:
        names = ", ".join(map(shown, found))
        raise OpenQuestion(
            f"the source holds more than one {kind}: {names}. Name the one to convert with "
            f"--{kind}-root"
        )
    return found[0] if found else None


def model_values(contents: Contents, root: KeyPath) -> dict[str, Tensor]:
    """The tensors right below `root`, by name; what is not a tensor there must be plain."""
    found: dict[str, Tensor] = {}
    for path, value in contents.values.items():
        if path[:-1] != root or not path:
            continue
        if isinstance(value, Tensor):
            found[str(path[-1])] = value
        elif (alien := foreign_in(value)) is not None:
            raise Forbidden(
                f"{shown(path)} is a {alien.qualified}, which a model's state dict cannot hold and "
                "which is never run"
            )
    return found


def keyed_optimizer(contents: Contents, root: KeyPath) -> Optimizer:
    """An optimizer whose states are keyed by FQN, nested or flattened, names cleaned."""
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    by_param: dict[str, dict[str, Any]] = {}
    for path, value in contents.values.items():
        if path[: len(root)] != root:
            continue
        if path in contents.differing:
            raise Incomplete(f"{shown(path)} is not the same on every rank")
        match path[len(root) :]:
            case ("state", str() as name, str() as key):
                state.setdefault(name, {})[key] = _plain(value, path)
            case ("state", str() as name) if value == {}:
                state.setdefault(name, {})
            case ("state", int(), *_):
                raise OpenQuestion(_by_id(root))
            case ("state",) if value == {}:
                pass
            case ("param_groups",) if isinstance(value, list):
                groups.update(enumerate(map(dict, value)))
            case ("param_groups", int() as number, str() as key):
                groups.setdefault(number, {})[key] = _plain(value, path)
            case (str() as flat,) if flat.startswith("state."):
                name, _, key = flat.removeprefix("state.").rpartition(".")
                state.setdefault(name, {})[key] = _plain(value, path)
            case (str() as flat,) if flat.startswith("param_groups."):
                name, _, key = flat.removeprefix("param_groups.").rpartition(".")
                by_param.setdefault(name, {})[key] = _plain(value, path)
            case ("param_names" | "param_id_map", *_):
                pass  # only repeats what the groups say
            case rest:
                raise Unsupported(f"{shown(path)}: no optimizer keeps {shown(tuple(rest))}")
    listed = [groups[number] for number in sorted(groups)] if groups else _regrouped(by_param)
    return _with_clean_names(state, [_plain(group, root) for group in listed], root)


def _optimizer_roots(values: Mapping[KeyPath, object]) -> dict[KeyPath, None]:
    roots: dict[KeyPath, None] = {}
    for path in values:
        for depth, key in enumerate(path):
            if key == "param_groups" or (isinstance(key, str) and key.startswith("param_groups.")):
                roots.setdefault(path[:depth])
                break
    return roots


def _belongs(path: KeyPath, root: KeyPath) -> bool:
    """Whether `path` is part of the optimizer at `root`."""
    key = path[len(root)] if len(path) > len(root) and path[: len(root)] == root else None
    return isinstance(key, str) and (
        key in ("state", "param_groups", "param_names", "param_id_map")
        or key.startswith(("state.", "param_groups."))
    )


def _named_like_model(root: KeyPath) -> bool:
    return bool(root) and root[-1] in MODEL_NAMES


def _by_id(root: KeyPath) -> str:
    return (
        f"{shown(root)}: the optimizer's states are numbered, not named, and this format does not "
        "say which number is which parameter"
    )


def _plain(value: Any, path: KeyPath) -> Any:
    alien = foreign_in(value)
    if alien is not None:
        raise Forbidden(
            f"{shown(path)} holds a {alien.qualified}, which is never run and cannot be converted"
        )
    return value


def _regrouped(by_param: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Groups from the flattened form, which repeats a group's keys for each of its parameters.

    Parameters with the same values are one group; two groups with equal values become one.
    """
    groups: list[dict[str, Any]] = []
    for name, options in by_param.items():
        same = next(
            (g for g in groups if {**g, "params": None} == {**options, "params": None}), None
        )
        if same is None:
            groups.append({**options, "params": [name]})
        else:
            same["params"].append(name)
    return groups


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _with_clean_names(
    state: Mapping[str, Mapping[str, Any]], listed: list[dict[str, Any]], root: KeyPath
) -> Optimizer:
    names = dict.fromkeys(state)
    for group in listed:
        params = group.get("params")
        if not isinstance(params, list | tuple) or not all(isinstance(p, str) for p in params):
            raise (
                OpenQuestion(_by_id(root))
                if params
                else Corrupt(f"{shown(root)}: a param group without its params")
            )
        names.update(dict.fromkeys(params))
    new = cleaned(names)
    if len(set(new.values())) != len(new):
        raise Corrupt(f"{shown(root)}: two of its parameter names are the same but for wrappers")
    return Optimizer(
        state={new[name]: dict(entries) for name, entries in state.items()},
        groups=tuple(
            Group(
                tuple(new[name] for name in group["params"]),
                _without_params(group),
            )
            for group in listed
        ),
    )
