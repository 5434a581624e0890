"""What a run found and did: every FSDP1 use in exactly one state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_migrate.rewrite.options import State

STATES: tuple[State, ...] = ("rewritten", "differs", "todo", "skipped")


@dataclass(frozen=True, slots=True)
class Site:
    """One FSDP1 use: where it stands, what it is, and what became of it."""

    file: str
    line: int  # one-based, in the source as it was read
    api: str
    state: State
    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """One file. `error` says why the file could not be handled; `after` then equals `before`."""

    path: str
    before: str
    after: str
    sites: tuple[Site, ...] = ()
    error: str | None = None

    @property
    def changed(self) -> bool:
        return self.before != self.after


def totals(results: Iterable[Result]) -> dict[State, int]:
    """How many sites ended in each state."""
    counted = Counter(site.state for result in results for site in result.sites)
    return {state: counted[state] for state in STATES}
