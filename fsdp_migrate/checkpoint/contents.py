"""
What a reader found in a source, before it is sorted into model and optimizer.

Every saved thing has a path: the keys that lead to it from the top of what was saved, so
("model", "layers.0.weight"). FQNs contain dots, so a path is never written as one string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fsdp_migrate.checkpoint.index import Role
from fsdp_migrate.checkpoint.pickles import Foreign, Inert, Stored
from fsdp_migrate.checkpoint.tensors import Tensor

KeyPath: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """Two copies of the same elements, in two files; whether they are equal is for a later step."""

    path: KeyPath
    kept: Tensor
    other: Tensor


@dataclass(frozen=True, slots=True)
class RankTree:
    """What one rank saved at some path: a Python tree with tensors as their records."""

    rank: int
    tree: Any


@dataclass(frozen=True, slots=True)
class Contents:
    """
    `values`: each path's Tensor (assembled over all ranks) or plain Python value.

    `raw` holds the optimizers that cannot be assembled path by path, because integer ids and flat
    shards must be understood first: one tree per rank. `flat_views` gives, for a flat parameter
    saved with use_orig_params=True, the element at which each original parameter's view into it
    begins. `differing` are the plain values that are not the same on every rank; rank 0's is in
    `values`. `module_paths` are the module names that torch keeps beside a saved model, wrapper
    segments included. `writer` tells what the container reveals of the torch that wrote it.
    """

    format: str
    values: Mapping[KeyPath, object]
    roles: Mapping[KeyPath, Role] = field(default_factory=dict)
    raw: Mapping[KeyPath, tuple[RankTree, ...]] = field(default_factory=dict)
    flat_views: Mapping[KeyPath, Mapping[str, int]] = field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()
    differing: frozenset[KeyPath] = frozenset()
    module_paths: tuple[str, ...] = ()
    world_size: int | None = None
    group_size: int | None = None
    writer: str = ""
    notes: tuple[str, ...] = ()

    def tensors(self) -> Iterator[tuple[KeyPath, Tensor]]:
        return ((path, value) for path, value in self.values.items() if isinstance(value, Tensor))


def shown(path: KeyPath) -> str:
    """A path for people."""
    return ".".join(map(str, path)) or "(top)"


def walk(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """
    The leaves of a saved tree: dicts are walked, lists and tuples only where tensors are inside.

    Raises nothing of its own; depth is bounded by what the unpickler let through.
    """
    if isinstance(tree, dict):
        if not tree and path:
            yield path, tree
        for key, value in tree.items():
            yield from walk(value, (*path, key))
    elif isinstance(tree, list | tuple) and any(_holds_tensor(item) for item in tree):
        for position, value in enumerate(tree):
            yield from walk(value, (*path, position))
    else:
        yield path, tree


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    return not isinstance(value, Foreign) and (isinstance(value, Inert | Stored))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is made of Python's own types, and tensors, alone."""
    if isinstance(value, dict):
        return depth < 50 and all(
            is_plain(key, depth + 1) and is_plain(item, depth + 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return depth < 50 and all(is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, bool | int | float | str | bytes | Tensor)


def foreign_in(value: Any, depth: int = 0) -> Foreign | None:
    """An object of a class that is not torch's, anywhere in a plain value."""
    if isinstance(value, Foreign):
        return value
    if depth > 50:
        return None
    if isinstance(value, dict):
        items: Any = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return None
    return next((found for item in items if (found := foreign_in(item, depth + 1))), None)
