"""Changes to the text of a YAML or JSON file, gathered first and made together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fsdp_migrate.rewrite.configs.document import Entry, Mapping

MARKER = "TODO(fsdp-migrate):"
# What may stand in YAML without quotes and still be read back as the same text.
PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


@dataclass
class Edits:
    text: str
    as_json: bool
    changes: list[tuple[int, int, str]] = field(default_factory=list)
    removed: list[tuple[Mapping, Entry]] = field(default_factory=list)
    added: list[tuple[Mapping, str, str]] = field(default_factory=list)

    @property
    def newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def set(self, entry: Entry, value: str) -> None:
        start, end = entry.value_span
        self.changes.append((start, end, " " * (start == end) + self._literal(value)))

    def rename(self, entry: Entry, key: str) -> None:
        quote = self.text[entry.key_span[0]]
        quoted = f"{quote}{key}{quote}" if quote in "\"'" else key
        self.changes.append((*entry.key_span, quoted))

    def remove(self, mapping: Mapping, entry: Entry) -> None:
        """Take the entry out, with the comment that shares its line; comments above stay."""
        self.removed.append((mapping, entry))

    def append(self, mapping: Mapping, key: str, value: str) -> None:
        """Add `key: value` as the last entry of a mapping that holds at least one."""
        self.added.append((mapping, key, value))

    def insert_above(self, entry: Entry, lines: list[str]) -> None:
        """Add whole lines above the line on which the entry begins, indented as that line is."""
        start = self._line_start(entry.key_span[0])
        line = self.text[start : entry.key_span[0]]
        indent = line[: len(line) - len(line.lstrip())]
        text = "".join(indent + line + self.newline for line in lines)
        self.changes.append((start, start, text))

    def mark(self, entry: Entry, rule: str, message: str) -> None:
        """Put the TODO above the entry, once. JSON has no comments: there the report must do."""
        comment = f"# {MARKER} {rule} {message}"
        above = self.text[: self._line_start(entry.key_span[0])].splitlines()
        while above and above[-1].strip().startswith("#"):
            if above.pop().strip() == comment:
                return
        if not self.as_json:
            self.insert_above(entry, [comment])

    def apply(self) -> str:
        """The new text. Insertions at one place keep the order in which they were asked for."""
        changes = [*self.changes]
        touched = {id(mapping.node): mapping for mapping, _ in self.removed}
        touched |= {id(mapping.node): mapping for mapping, *_ in self.added}
        for mapping in touched.values():
            changes += self._flow(mapping) if mapping.in_flow_style else self._block(mapping)
        text = self.text
        order = sorted(enumerate(changes), key=lambda c: (c[1][0], c[1][1], c[0]))
        for _, (start, end, new) in reversed(order):
            text = text[:start] + new + text[end:]
        return text

    def _of(self, mapping: Mapping) -> tuple[list[Entry], list[tuple[str, str]]]:
        gone = [entry for owner, entry in self.removed if owner.node is mapping.node]
        new = [(key, value) for owner, key, value in self.added if owner.node is mapping.node]
        return gone, new

    def _block(self, mapping: Mapping) -> list[tuple[int, int, str]]:
        gone, new = self._of(mapping)
        changes = [(self._line_start(e.key_span[0]), self._line_end(e), "") for e in gone]
        if new:
            last = list(mapping)[-1]
            before = self.text[self._line_start(last.key_span[0]) : last.key_span[0]]
            at = self._line_end(last)
            lines = [" " * len(before) + f"{key}: {self._literal(value)}" for key, value in new]
            complete = self.text.endswith("\n", 0, at)
            text = self.newline.join(lines)
            changes.append((at, at, text + self.newline if complete else self.newline + text))
        return changes

    def _flow(self, mapping: Mapping) -> list[tuple[int, int, str]]:
        """Commas stand between entries, so what is removed or added depends on what is left."""
        gone, new = self._of(mapping)
        entries = list(mapping)
        lost = {entry.key_span for entry in gone}
        kept = [entry for entry in entries if entry.key_span not in lost]
        last = kept[-1] if kept else None
        changes = [
            (entry.key_span[0], entries[i + 1].key_span[0], "")
            for i, entry in enumerate(entries)
            if entry.key_span in lost and last and entry.key_span < last.key_span
        ]
        start = last.value_span[1] if last else entries[0].key_span[0]
        comma = "," + self._gap(entries[0]) if last else ""
        text = comma + ("," + self._gap(entries[0])).join(self._pair(entries[0], *p) for p in new)
        changes.append((start, entries[-1].value_span[1], text if new else ""))
        return changes if gone else [*changes[:-1], (start, start, text)]

    def _pair(self, like: Entry, key: str, value: str) -> str:
        quoted = f'"{key}"' if self.text[like.key_span[0]] == '"' else key
        return f"{quoted}: {self._literal(value)}"

    def _gap(self, like: Entry) -> str:
        """A line break if the mapping's entries stand on lines of their own, else a blank."""
        before = self.text[self._line_start(like.key_span[0]) : like.key_span[0]]
        return " " if before.strip() else self.newline + before

    def _literal(self, value: str) -> str:
        """`value` as a scalar: booleans and numbers bare, other text quoted where it must be."""
        bare = value in ("true", "false") or value.isdigit()
        return value if bare or (not self.as_json and PLAIN.fullmatch(value)) else f'"{value}"'

    def _line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def _line_end(self, entry: Entry) -> int:
        end = self.text.find("\n", entry.value_span[1])
        return len(self.text) if end < 0 else end + 1
