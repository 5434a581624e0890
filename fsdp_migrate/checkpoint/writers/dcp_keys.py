"""
What a DCP directory calls things: flat keys, and the path each stands for.

A key is its path joined by dots; FQNs hold dots themselves, so `.metadata` keeps the path too, and
loading goes by it. Three styles, by who loads:

    plain        {"model": ..., "optim": ...} of get_state_dict, saved in one directory
    accelerate   {"model": ...} in pytorch_model_fsdp_0/, {"optimizer": ...} in optimizer_0/
    torchtitan   model FQNs at the root, flattened optimizer state under "optimizer"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_migrate.checkpoint.index import Index, Optimizer, StateValue
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.writers.dcp_metadata import Path
from fsdp_migrate.checkpoint.writers.options import KeyStyle
from fsdp_migrate.checkpoint.writers.tensor_pickle import is_plain_step
from fsdp_migrate.errors import Incomplete


@dataclass(frozen=True, slots=True)
class Named:
    """
    One leaf of a directory: a Tensor, or a plain value. `model` is the FQN where it is one of the
    model's own tensors, `of` that of the parameter an optimizer tensor belongs to.
    """

    path: Path
    value: object
    model: str | None = None
    of: str | None = None
    step: bool = False  # a plain number that is to become a tensor

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


def directories(index: Index, style: KeyStyle) -> dict[str, list[Named]]:
    """The leaves of each directory ("" is the output itself), in the order of the index."""
    if style == "torchtitan":
        leaves = [*_model(index, ()), *_flattened(index.optimizer), *_extras(index)]
        return {"": _distinct(leaves)}
    if style == "accelerate":
        made = {}
        if index.model:
            made["pytorch_model_fsdp_0"] = _distinct(list(_model(index, ("model",))))
        if index.optimizer is not None:
            made["optimizer_0"] = _distinct(list(_nested(index.optimizer, "optimizer")))
        return made
    leaves = [*_model(index, ("model",)), *_nested(index.optimizer, "optim"), *_extras(index)]
    return {"": _distinct(leaves)}


def homeless_extras(index: Index, style: KeyStyle) -> list[tuple[object, ...]]:
    """The paths of values beside model and optimizer that `style` has no place for."""
    return list(index.extras) if style == "accelerate" else []


def _extras(index: Index) -> Iterator[Named]:
    """What is beside model and optimizer, where it was."""
    for path, value in index.extras.items():
        yield from leaves(path, value)


def _model(index: Index, root: Path) -> Iterator[Named]:
    for fqn, tensor in index.model.items():
        yield Named((*root, fqn), tensor, model=fqn)


def _nested(optimizer: Optimizer | None, root: str) -> Iterator[Named]:
    if optimizer is None:
        return
    for fqn, entries in optimizer.state.items():
        for name, value in entries.items():
            yield from _state((root, "state", fqn, name), fqn, name, value)
    if not optimizer.groups:
        yield Named((root, "param_groups"), [])
    for number, group in enumerate(optimizer.groups):
        for key, value in group.options.items():
            yield from leaves((root, "param_groups", number, key), value)
        yield Named((root, "param_groups", number, "params"), list(group.params))


def _flattened(optimizer: Optimizer | None) -> Iterator[Named]:
    """As `StateDictOptions(flatten_optimizer_state_dict=True)`: a group's options once a member."""
    if optimizer is None:
        return
    for fqn, entries in optimizer.state.items():
        for name, value in entries.items():
            yield from _state(("optimizer", f"state.{fqn}.{name}"), fqn, name, value)
    for group in optimizer.groups:
        for fqn in group.params:
            for key, value in group.options.items():
                yield from leaves(("optimizer", f"param_groups.{fqn}.{key}"), value)


def _state(path: Path, fqn: str, name: str, value: StateValue) -> Iterator[Named]:
    if is_plain_step(name, value):
        yield Named(path, value, of=fqn, step=True)
        return
    for leaf in leaves(path, value):
        yield Named(leaf.path, leaf.value, of=fqn)


def leaves(path: Path, value: object) -> Iterator[Named]:
    """
    Cut into leaves as DCP's planner cuts: a dict always, a list where tensors or dicts are inside.
    (Source: torch 2.6.0 and 2.13.0, `_traverse.py`.)
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves((*path, str(key)), item)
    elif isinstance(value, list) and not _is_leaf(value):
        for number, item in enumerate(value):
            yield from leaves((*path, number), item)
    else:
        yield Named(path, value)


def _is_leaf(values: list[object]) -> bool:
    return not any(
        isinstance(value, (Tensor, Mapping)) or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def _distinct(leaves: list[Named]) -> list[Named]:
    seen: dict[str, Path] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.key, leaf.path)
        if other is not leaf.path:
            raise Incomplete(f"two values would be called {leaf.key}: {other} and {leaf.path}")
    return leaves
