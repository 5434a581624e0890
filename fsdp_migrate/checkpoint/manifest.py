"""
`fsdp_migrate.json`: what was converted, from where, under which names, and each tensor's hash.

The same input gives the same manifest: it holds no time and no host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_migrate import __version__
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.load import Loaded
from fsdp_migrate.checkpoint.writers import TargetOptions

NAME = "fsdp_migrate.json"
SCHEMA = 1


def beside(output: Path) -> Path:
    """Where the manifest of an output that is one file goes."""
    return output.with_name(f"{output.name}.{NAME}")


def dumps(
    loaded: Loaded,
    index: Index,
    to: str,
    target: TargetOptions,
    hashes: Mapping[str, str] | None,
) -> str:
    """`hashes` is None where nothing was verified."""
    renamed = {t.origin: name for name, t in index.model.items() if t.origin != name}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "tool": f"fsdp-migrate {__version__}",
        "source": {
            "path": str(loaded.source.path.resolve()),
            "format": loaded.contents.format,
            "world_size": loaded.contents.world_size,
        },
        "target": {"format": to, "dtype": target.dtype, "ranks": target.ranks, "keys": target.keys},
        "renamed": renamed,
        "verified": hashes is not None,
        "hash": "xxh3_128 of each tensor's bytes in row-major order, little-endian",
        "tensors": dict(hashes or {}),
        "notes": list(index.notes),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
