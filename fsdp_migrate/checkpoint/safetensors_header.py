"""
The header of a safetensors file: 8 bytes of length (little-endian), then JSON.

Source: the format's own description. Checked as strictly as its reference reader does: byte ranges
touch, start at 0 and end at the end of the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.dtypes import FROM_SAFETENSORS
from fsdp_migrate.checkpoint.tensors import Shape
from fsdp_migrate.errors import Corrupt

LARGEST = 100_000_000  # the format's own limit for the header


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of torch dtype `dtype` whose bytes begin at absolute `offset` of the file."""

    dtype: str
    shape: Shape
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: Path, fd: int, start: int = 0) -> Header:
    """The header of the safetensors data in `path` from byte `start` to its end."""
    length_bytes = os.pread(fd, 8, start)
    if len(length_bytes) < 8:
        raise Corrupt(f"{path}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", length_bytes)
    size = os.fstat(fd).st_size
    if not 2 <= length <= LARGEST or start + 8 + length > size:
        raise Corrupt(f"{path}: claims a header of {length} bytes; truncated, or not safetensors")
    raw = os.pread(fd, length, start + 8)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise Corrupt(f"{path}: its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise Corrupt(f"{path}: its __metadata__ is not a JSON object")
    base = start + 8 + length
    spans = sorted(_span(path, name, entry) for name, entry in header.items())
    reached = 0
    for begin, end, name in spans:
        if begin != reached:
            raise Corrupt(f"{path}: {name} begins at byte {begin} of the data, expected {reached}")
        reached = end
    if base + reached != size:
        raise Corrupt(f"{path}: should have {base + reached} bytes, has {size}: truncated?")
    entries = {}
    for name, entry in header.items():
        dtype = FROM_SAFETENSORS[entry["dtype"]].name
        entries[name] = Entry(dtype, tuple(entry["shape"]), base + entry["data_offsets"][0])
    return Header(entries, metadata)


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    try:
        begin, end = entry["data_offsets"]
        shape, dtype = entry["shape"], entry["dtype"]
        numbers = [begin, end, *shape]
    except (TypeError, KeyError, ValueError):
        raise Corrupt(f"{path}: the entry of {name} is not one of a safetensors header") from None
    if any(type(n) is not int or n < 0 for n in numbers):
        raise Corrupt(f"{path}: the entry of {name} has a number that is no size")
    if dtype not in FROM_SAFETENSORS:
        raise Corrupt(f"{path}: {name} has unknown dtype {dtype!r}")
    if end - begin != math.prod(shape) * FROM_SAFETENSORS[dtype].bytes:
        raise Corrupt(f"{path}: {name} of shape {shape} does not have {end - begin} bytes")
    return begin, end, name
