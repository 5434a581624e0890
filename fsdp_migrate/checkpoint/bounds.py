"""
Bounds on what a hostile pickle may cost: memory while it is read, depth and size of what it made.

A few bytes of pickle can ask for gigabytes (one opcode that grows the memo table), nest deeper than
Python recurses, refer to itself, or refer to one list so often that walking it never ends.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_migrate.errors import Corrupt

_BASE_MEMORY = 1 << 30
_MEMORY_PER_BYTE = 128  # of pickle: an empty dict takes one byte there and 80 in memory
_DEEPEST = 100  # levels; real checkpoints have fewer than ten
_LARGEST = 1 << 25  # containers and leaves, each counted as often as it is reached


@contextmanager
def limited_memory(pickle_size: int) -> Iterator[None]:
    """Make allocations far out of proportion to a pickle of that size fail (`MemoryError`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _address_space() + _BASE_MEMORY + _MEMORY_PER_BYTE * pickle_size
    if sys.platform != "linux" or (soft != resource.RLIM_INFINITY and soft < wanted):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    if sys.platform != "linux":
        return 0
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * resource.getpagesize()


def check_tree(tree: Any, path: Path) -> None:
    """Raise `Corrupt` where `tree`'s containers are too deep, too many, or hold themselves."""
    _count(tree, path, {}, 0)


def _count(value: Any, path: Path, known: dict[int, int], depth: int) -> int:
    """How many values a walk from `value` reaches; `known` holds 0 for containers in progress."""
    if isinstance(value, dict):
        items: Any = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return 1
    counted = known.get(id(value))
    if counted == 0:
        raise Corrupt(f"{path}: its pickle holds a container that contains itself")
    if counted is not None:
        return counted
    if depth > _DEEPEST:
        raise Corrupt(f"{path}: its pickle is nested deeper than {_DEEPEST} levels")
    known[id(value)] = 0
    total = 1 + sum(_count(item, path, known, depth + 1) for item in items)
    if total > _LARGEST:
        raise Corrupt(f"{path}: its pickle unfolds to more than {_LARGEST} values")
    known[id(value)] = total
    return total
