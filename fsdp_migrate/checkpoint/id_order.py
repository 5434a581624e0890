"""
Which parameter is which integer id of an optimizer.

`Optimizer.state_dict()` numbers parameters through its groups: group 0 first, then group 1. Within
a group they stand in the model's order, because they come from iterating over the model; some may
be left out. So the ids are the model's parameters dealt out to groups, and the sizes of the states
tell how: what remains is to count the ways in which that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fsdp_migrate.errors import OpenQuestion

Slot = TypeVar("Slot")
_MOST_STATES = 20_000


def assignments(
    slots: Sequence[Slot],
    groups: Sequence[Sequence[int]],
    fits: Callable[[Slot, int], bool],
    optional: Callable[[Slot], bool],
) -> list[dict[int, Slot]]:
    """
    The ways to give every id one slot: none, one, or two of those that there are.

    Slots are used in order within each group, and each at most once; those that are not `optional`
    must be used. `fits` says whether an id may be a slot.
    """
    # How far into each group -> up to two ways to get there, each a linked list of (slot, id).
    reached: dict[tuple[int, ...], list[_Step | None]] = {(0,) * len(groups): [None]}
    for at, slot in enumerate(slots):
        following: dict[tuple[int, ...], list[_Step | None]] = {}
        for position, ways in reached.items():
            if optional(slot):
                _add(following, position, ways)
            for number, ids in enumerate(groups):
                if position[number] < len(ids) and fits(slot, ids[position[number]]):
                    taken = ids[position[number]]
                    moved = (*position[:number], position[number] + 1, *position[number + 1 :])
                    _add(following, moved, [(way, at, taken) for way in ways])
        reached = _completable(following, groups, len(slots) - at - 1)
        if len(reached) > _MOST_STATES:
            raise OpenQuestion(
                "the optimizer's parameters could be dealt out to its groups in too many ways to "
                "tell which is which; save it by name (FSDP.optim_state_dict) instead"
            )
    whole = reached.get(tuple(len(ids) for ids in groups), [])
    return [{taken: slots[at] for at, taken in _unlinked(way)} for way in whole]


_Step = tuple["_Step | None", int, int]


def _add(
    states: dict[tuple[int, ...], list[_Step | None]],
    position: tuple[int, ...],
    ways: Sequence[_Step | None],
) -> None:
    known = states.setdefault(position, [])
    known.extend(ways[: 2 - len(known)])


def _completable(
    states: dict[tuple[int, ...], list[_Step | None]],
    groups: Sequence[Sequence[int]],
    slots_left: int,
) -> dict[tuple[int, ...], list[_Step | None]]:
    total = sum(len(ids) for ids in groups)
    return {
        position: ways for position, ways in states.items() if total - sum(position) <= slots_left
    }


def _unlinked(way: _Step | None) -> list[tuple[int, int]]:
    pairs = []
    while way is not None:
        way, at, taken = way
        pairs.append((at, taken))
    return pairs[::-1]
