"""What a run of `rewrite-code` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["rewritten", "differs", "todo", "skipped"]
Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """
    `select`/`ignore` name rules; an empty `select` means all of them. `unsafe` adds the rules
    whose result is not the same by construction; `exact` keeps FSDP1's numerics even where that
    reads worse. `target_torch` is the oldest torch the result must run on.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    unsafe: bool = False
    exact: bool = False
    target_torch: Version = (2, 6)
    jobs: int = 1

    def wants(self, rule: str) -> bool:
        return rule not in self.ignore and (not self.select or rule in self.select)
