"""JSON lines of one rank. Floats are written as `float.hex`: nothing is rounded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Recorder:
    def __init__(self, file: Path) -> None:
        self._out = file.open("w", buffering=1)
        self._notes: set[str] = set()

    def emit(self, event: str, **content: Any) -> None:
        self._out.write(json.dumps({"event": event, **_plain(content)}) + "\n")

    def note(self, text: str) -> None:
        """Something the reader of the verdict must know; said once."""
        if text not in self._notes:
            self._notes.add(text)
            self.emit("note", text=text)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
