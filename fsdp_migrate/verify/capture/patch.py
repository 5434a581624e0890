"""
Replacing a function everywhere it is known by.

torch re-exports its functions (`dist.all_reduce`, `torch.distributed.distributed_c10d.all_reduce`),
and libraries import them by name, so that setting one attribute misses the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Patches:
    """Collects replacements, then puts them into every loaded module at once."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `make(original)`, where torch has that name."""
        if (original := getattr(owner, name, None)) is None:
            return
        known = self._by_id.get(id(original))
        replacement = known[1] if known else make(original)
        setattr(owner, name, replacement)
        self._by_id[id(original)] = (original, replacement)

    def spread(self) -> None:
        for module in list(sys.modules.values()):
            space = getattr(module, "__dict__", None)
            if not isinstance(space, dict):
                continue
            for name, value in list(space.items()):
                found = self._by_id.get(id(value))
                if found is not None and found[0] is value:
                    space[name] = found[1]
