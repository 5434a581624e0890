"""
What an optimizer's own state_dict() holds on every rank, id by id, before the ids have names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_migrate.checkpoint.contents import RankTree, foreign_in
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.pickles import Stored
from fsdp_migrate.checkpoint.shards import Meshes, RankValue, rank_value
from fsdp_migrate.checkpoint.tensors import Tensor, piece
from fsdp_migrate.errors import Corrupt, Forbidden, Incomplete


@dataclass(frozen=True, slots=True)
class Held:
    """One id: state name ("exp_avg") to rank to the tensor or plain value that this rank holds."""

    number: int
    states: Mapping[str, Mapping[int, Any]]

    def tensors(self) -> Iterator[tuple[str, Mapping[int, RankValue]]]:
        """The states that are tensors."""
        for name, by_rank in self.states.items():
            if all(isinstance(value, RankValue) for value in by_rank.values()):
                yield name, by_rank


@dataclass(frozen=True, slots=True)
class Numbered:
    """
    The optimizer of all ranks: `groups` are the ids of each param group, `options` its other keys.

    `names` are those that the optimizer itself was given (torch 2.6 and later: `param_names`).
    """

    ranks: tuple[int, ...]
    held: Mapping[int, Held]
    groups: tuple[tuple[int, ...], ...]
    options: tuple[Mapping[str, object], ...]
    names: Mapping[int, str]

    @property
    def ids(self) -> list[int]:
        return [number for group in self.groups for number in group]


def numbered(trees: Sequence[RankTree]) -> Numbered:
    """
    `trees`: {"state": {id: {name: value}}, "param_groups": [...]} of every rank.

    Raises `Incomplete` where ranks contradict each other.
    """
    first, *others = trees
    groups, options = _groups(first)
    for other in others:
        _check_same(first.rank, groups, options, other)
    states: dict[int, dict[str, dict[int, Any]]] = {n: {} for ids in groups for n in ids}
    with Gatherer() as gatherer:
        for tree in trees:
            meshes = Meshes(gatherer)
            for number, entries in tree.tree["state"].items():
                if number not in states:
                    raise Incomplete(
                        f"optimizer of rank {tree.rank}: state of id {number}, which is in no "
                        "param group"
                    )
                if not isinstance(entries, dict):
                    raise Corrupt(f"optimizer of rank {tree.rank}: id {number} has no states")
                for name, value in entries.items():
                    found = rank_value(value, f"optimizer state {number}.{name}", meshes)
                    if found is None:
                        found = _plain(value, f"optimizer state {number}.{name}")
                    states[number].setdefault(str(name), {})[tree.rank] = found
    return Numbered(
        ranks=tuple(tree.rank for tree in trees),
        held={number: Held(number, entries) for number, entries in states.items()},
        groups=tuple(groups),
        options=tuple(options),
        names=_names(groups, options),
    )


def whole(stored: Stored, name: str) -> Tensor:
    """A plain tensor of one file."""
    zeros = (0,) * len(stored.shape)
    part = piece(stored.shape, zeros, stored.shape, stored.strides, stored.path, stored.offset)
    return Tensor(name, stored.dtype, stored.shape, (part,), str(stored.path))


def _groups(tree: RankTree) -> tuple[list[tuple[int, ...]], list[dict[str, object]]]:
    groups, options = [], []
    listed = tree.tree["param_groups"]
    for number, group in enumerate(listed if isinstance(listed, list) else [None]):
        where = f"optimizer of rank {tree.rank}: param group {number}"
        ids = group.get("params") if isinstance(group, dict) else None
        if not isinstance(ids, list | tuple) or any(type(value) is not int for value in ids):
            raise Corrupt(f"{where} has no list of ids")
        groups.append(tuple(ids))
        options.append(
            {
                str(key): whole(value, f"param_groups.{number}.{key}")
                if isinstance(value, Stored)
                else _plain(value, where)
                for key, value in group.items()
                if key != "params"
            }
        )
    every = [value for ids in groups for value in ids]
    if len(set(every)) != len(every):
        raise Corrupt(f"optimizer of rank {tree.rank}: an id is in two param groups")
    return groups, options


def _check_same(
    rank: int,
    groups: Sequence[Sequence[int]],
    options: Sequence[Mapping[str, object]],
    other: RankTree,
) -> None:
    its_groups, its_options = _groups(other)
    if list(groups) != its_groups:
        raise Incomplete(
            f"the optimizers of ranks {rank} and {other.rank} have different param groups: their "
            "files are not of one checkpoint"
        )
    for number, (mine, its) in enumerate(zip(options, its_options, strict=True)):
        for key in sorted({*mine, *its}):
            values = mine.get(key), its.get(key)
            same = values[0] == values[1] or all(isinstance(v, Tensor) for v in values)
            if not same or (key in mine) != (key in its):
                raise Incomplete(
                    f"param group {number}: {key} is {values[0]!r:.60} on rank {rank} and "
                    f"{values[1]!r:.60} on rank {other.rank}"
                )


def _names(
    groups: Sequence[Sequence[int]], options: Sequence[Mapping[str, object]]
) -> dict[int, str]:
    """Of the groups that have them; a group whose names do not fit its ids has none."""
    names: dict[int, str] = {}
    for ids, group in zip(groups, options, strict=True):
        listed = group.get("param_names")
        if isinstance(listed, list | tuple) and len(listed) == len(ids):
            names.update(zip(ids, map(str, listed), strict=True))
    return names


def _plain(value: Any, where: str) -> Any:
    alien = foreign_in(value)
    if alien is not None:
        raise Forbidden(
            f"{where} holds a {alien.qualified}, which is never run and cannot be converted"
        )
    return value
