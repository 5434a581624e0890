"""
Comments by which the user keeps the tool away, and the markers the tool leaves.

`# fsdp-migrate: skip` on any line of a statement, or alone above it, skips that statement;
`skip[RULE,...]` skips it for these rules only; `skip-file` anywhere skips the whole file.
"""

from __future__ import annotations

import re

_SKIP = re.compile(r"#\s*fsdp-migrate:\s*skip(?!-)(?:\[([^\]]*)\])?")
_SKIP_FILE = re.compile(r"^\s*#\s*fsdp-migrate:\s*skip-file\b", re.MULTILINE)
_LONGEST = 160
MARKER = "# TODO(fsdp-migrate):"


class Skips:
    """Which lines of a file are skipped, for which rules (None: for all)."""

    def __init__(self, text: str) -> None:
        self.whole_file = _SKIP_FILE.search(text) is not None
        self._lines: dict[int, frozenset[str] | None] = {}
        lines = text.splitlines()
        for number, line in enumerate(lines, start=1):
            if (found := _SKIP.search(line)) is None:
                continue
            named = found.group(1)
            rules = None if named is None else frozenset(re.split(r"[\s,]+", named.strip()))
            alone = line[: found.start()].strip() == ""
            self._lines[number + self._gap(lines, number) if alone else number] = rules

    def covers(self, first: int, last: int, rule: str) -> bool:
        """Whether a statement on lines `first` to `last` is skipped for `rule`."""
        for line in range(first, last + 1):
            rules = self._lines.get(line, frozenset())
            if rules is None or rule in rules:
                return True
        return False

    @staticmethod
    def _gap(lines: list[str], number: int) -> int:
        """How many lines further down the statement below a comment of its own starts."""
        gap = 1
        while number + gap <= len(lines):
            line = lines[number + gap - 1].strip()
            if line and not line.startswith("#"):
                break
            gap += 1
        return gap


def marker(rule: str, message: str) -> str:
    """One line, however long the code that the message quotes."""
    return f"{MARKER} {rule} {_short(message)}"


def _short(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
