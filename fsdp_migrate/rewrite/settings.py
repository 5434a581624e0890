"""`[tool.fsdp-migrate]` of the nearest pyproject.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fsdp_migrate.errors import Corrupt, UsageError
from fsdp_migrate.rewrite.options import Options, Version

_LISTS = ("select", "ignore")
_FLAGS = ("unsafe", "exact")


def from_pyproject(start: Path) -> Options:
    """
    The options a project sets for itself; defaults where it sets none.

    Raises Corrupt for a broken file and UsageError for a key or value that means nothing here.
    """
    folder = start if start.is_dir() else start.parent
    for parent in (folder.resolve(), *folder.resolve().parents):
        path = parent / "pyproject.toml"
        if path.is_file():
            return _read(path)
    return Options()


def _read(path: Path) -> Options:
    try:
        table = tomlkit.parse(path.read_text("utf-8")).unwrap()
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise Corrupt(f"{path}: is not valid TOML: {error}") from None
    options = Options()
    for key, value in table.get("tool", {}).get("fsdp-migrate", {}).items():
        options = _set(options, key.replace("_", "-"), value, path)
    return options


def _set(options: Options, key: str, value: object, path: Path) -> Options:
    if key in _LISTS and isinstance(value, list) and all(isinstance(one, str) for one in value):
        names = tuple(str(one) for one in value)
        return replace(options, select=names) if key == "select" else replace(options, ignore=names)
    if key in _FLAGS and isinstance(value, bool):
        return replace(options, unsafe=value) if key == "unsafe" else replace(options, exact=value)
    if key == "target-torch" and isinstance(value, str):
        return replace(options, target_torch=version(value))
    if key == "jobs" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return replace(options, jobs=value)
    raise UsageError(
        f"{path}: [tool.fsdp-migrate] {key} = {value!r}: known are select and ignore (lists of"
        " rules), unsafe and exact (true or false), target-torch (a string), jobs (a number)"
    )


def version(text: str) -> Version:
    """`2.6` or `2.6.1` as a pair. Raises UsageError for anything else or before fully_shard."""
    parts = text.split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise UsageError(f"--target-torch {text}: expected a version such as 2.6")
    found = (int(parts[0]), int(parts[1]))
    if found < (2, 4):
        raise UsageError(f"--target-torch {text}: fully_shard came with torch 2.4")
    return found
