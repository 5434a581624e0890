"""
safetensors: one file, a Hugging Face set with its index, or the sharded set that torch's own
HuggingFaceStorageWriter leaves (each file's metadata gives the boxes it holds).

Only headers are read; they give each tensor's byte range.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.archive import open_file
from fsdp_migrate.checkpoint.contents import Contents
from fsdp_migrate.checkpoint.safetensors_header import Entry, Header, read_header
from fsdp_migrate.checkpoint.tensors import Piece, Shape, Tensor, piece, row_major
from fsdp_migrate.errors import Corrupt, Incomplete

FORMAT = "safetensors"
_SHARDING = "DCP_SHARDING_INFO"  # JSON {fqn: {"saved_offsets": [...]}} (torch 2.8 and later)


def read(files: Sequence[Path], index: Path | None = None) -> Contents:
    """`index` is the `*.safetensors.index.json` that lists what the files must hold."""
    headers = {file: _header(file) for file in files}
    boxes: dict[str, list[tuple[Path, Entry, Shape]]] = {}
    for file, header in headers.items():
        offsets = _saved_offsets(file, header)
        for name, entry in header.entries.items():
            at = offsets.get(name, (0,) * len(entry.shape))
            boxes.setdefault(name, []).append((file, entry, at))
            if len(boxes[name]) > 1 and name not in offsets:
                raise Incomplete(f"{name}: in both {boxes[name][0][0].name} and {file.name}")
    if index is not None:
        _check_index(index, boxes)
    values = {(name,): _tensor(name, found) for name, found in boxes.items()}
    return Contents(format=FORMAT, values=values)


def _header(file: Path) -> Header:
    fd = open_file(file)
    try:
        return read_header(file, fd)
    finally:
        os.close(fd)


def _tensor(name: str, found: list[tuple[Path, Entry, Shape]]) -> Tensor:
    dtype = found[0][1].dtype
    dims = len(found[0][1].shape)
    if any(entry.dtype != dtype or len(entry.shape) != dims for _, entry, _ in found):
        raise Incomplete(f"{name}: its parts differ in dtype or number of dimensions")
    shape = tuple(max(at[dim] + entry.shape[dim] for _, entry, at in found) for dim in range(dims))
    pieces: list[Piece] = [
        piece(shape, at, entry.shape, row_major(entry.shape), file, entry.offset)
        for file, entry, at in found
    ]
    return Tensor(name, dtype, shape, tuple(pieces))


def _saved_offsets(file: Path, header: Header) -> Mapping[str, Shape]:
    text = header.metadata.get(_SHARDING)
    if text is None:
        return {}
    try:
        return {
            name: tuple(int(n) for n in info["saved_offsets"])
            for name, info in json.loads(text).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Corrupt(f"{file}: its {_SHARDING} is not what torch writes") from None


def _check_index(index: Path, boxes: Mapping[str, list[tuple[Path, Entry, Shape]]]) -> None:
    """The index and the files must tell of the same tensors."""
    try:
        listed: dict[str, Any] = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise Corrupt(f"{index}: not an index of safetensors files ({error})") from None
    for name, file in listed.items():
        if name not in boxes:
            raise Incomplete(f"{index.name} lists {name} in {file}, which is not there")
    extra = next((name for name in boxes if name not in listed), None)
    if extra is not None:
        raise Incomplete(f"{extra} is in {boxes[extra][0][0].name}, but not in {index.name}")
