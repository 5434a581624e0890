"""
One file's conversion: decide every setting first, then edit all of them or none.

A configuration that is FSDP2 in part would start and train differently, so a single open question
leaves the whole of it as it stands, with the question written above its line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fsdp_migrate.rewrite.configs.document import Entry, Mapping
from fsdp_migrate.rewrite.configs.edits import Edits
from fsdp_migrate.rewrite.configs.settings import Outcome
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.report import Site


class Dialect(Protocol):
    """A project's configuration file. A module of this package satisfies it."""

    RULE: str

    def recognises(self, top: Mapping, path: str) -> bool: ...

    def convert(self, top: Mapping, conversion: Conversion) -> None: ...


@dataclass
class Conversion:
    path: str
    rule: str
    edits: Edits
    sites: list[Site] = field(default_factory=list)
    decided: list[tuple[Mapping, Entry, Outcome]] = field(default_factory=list)

    def decide(self, mapping: Mapping, entry: Entry, outcome: Outcome) -> None:
        self.decided.append((mapping, entry, outcome))

    def tell(self, entry: Entry, state: State, message: str) -> None:
        self.sites.append(Site(self.path, entry.line, entry.key, state, self.rule, message))

    @property
    def is_open(self) -> bool:
        return any(outcome.state == "todo" for *_, outcome in self.decided)

    def leave_open(self) -> None:
        """Mark what is open; name the rest as waiting for it. Nothing else changes."""
        for _, entry, outcome in self.decided:
            if outcome.state == "todo":
                self.edits.mark(entry, self.rule, outcome.message)
                self.tell(entry, "todo", outcome.message)
            elif outcome.state is not None:
                self.tell(entry, "skipped", "left until the open question in this file is answered")

    def make(self) -> None:
        """Edit every decided entry."""
        for mapping, entry, outcome in self.decided:
            if outcome.key == "":
                self.edits.remove(mapping, entry)
            else:
                if outcome.key is not None and outcome.key != entry.key:
                    self.edits.rename(entry, outcome.key)
                if outcome.value is not None and outcome.value != entry.text:
                    self.edits.set(entry, outcome.value)
            if outcome.state is not None:
                self.tell(entry, outcome.state, outcome.message)
