"""
Check archive records against the CRC-32 that torch stored with them, reading no byte twice.

Whoever reads a checkpoint's tensors for another reason (to compare them) notes the CRC-32 of each
stretch on the way. A record's sum is then combined from the sums of its stretches, whatever tensors
they belong to; only what lies between them is still to be read.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from isal import isal_zlib

from fsdp_migrate.checkpoint.archive import MAGIC, Record, index_archive
from fsdp_migrate.checkpoint.execute import BUFFER
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.tensors import Item, Tensor
from fsdp_migrate.errors import Corrupt


class Stretch(NamedTuple):
    """`size` bytes from byte `offset` of a file on, whose CRC-32 is known."""

    offset: int
    size: int
    crc: int


Windows = set[tuple[int, int | None]]  # (offset, length) of each archive in a file


class Records:
    """The archives that `tensors` lie in. Files without such sums (safetensors) have none."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found: dict[Path, Windows] = {}
        for tensor in tensors:
            for part in tensor.pieces:
                store = part.store
                if isinstance(store, Item):
                    found.setdefault(store.path, set()).add((store.offset, store.length))
                elif store not in found:
                    found[store] = {(0, None)}
        self._windows = {path: windows for path, windows in found.items() if _is_archive(path)}
        self._known: dict[Path, list[Stretch]] = {path: [] for path in self._windows}

    def __contains__(self, path: object) -> bool:
        """Whether sums of stretches of `path` are of use."""
        return path in self._known

    def note(self, path: Path, stretch: Stretch) -> None:
        """Any thread may call this."""
        self._known[path].append(stretch)

    @property
    def paths(self) -> Sequence[Path]:
        return tuple(self._windows)

    def check(self, path: Path, gatherer: Gatherer) -> None:
        """Raises `Corrupt` for the first record of `path` whose bytes do not have its sum."""
        fd = gatherer.file(path)
        known = sorted(self._known[path])
        for start, length in sorted(self._windows[path], key=lambda window: window[0]):
            if os.pread(fd, 4, start) != MAGIC:
                continue
            for name, record in index_archive(path, fd, start, length).records.items():
                if record.crc is not None and _crc(fd, record, known) != record.crc:
                    raise Corrupt(
                        f"{path}: record {name} is damaged: its bytes do not have the CRC-32 that "
                        "was stored with them"
                    )


def _is_archive(path: Path) -> bool:
    with Gatherer() as gatherer:
        return os.pread(gatherer.file(path), 4, 0) == MAGIC


def _crc(fd: int, record: Record, known: Sequence[Stretch]) -> int:
    """Combined from the known stretches inside of the record, and from reading what they leave."""
    crc, at, end = 0, record.offset, record.offset + record.size
    for position in range(bisect_left(known, (at,)), len(known)):
        stretch = known[position]
        if stretch.offset >= end:
            break
        if stretch.offset < at or stretch.offset + stretch.size > end:
            continue  # overlaps one that counts already (tied weights are read twice)
        crc = _read(fd, at, stretch.offset, crc)
        crc = isal_zlib.crc32_combine(crc, stretch.crc, stretch.size)
        at = stretch.offset + stretch.size
    return _read(fd, at, end, crc)


def _read(fd: int, start: int, end: int, crc: int) -> int:
    """Goes on with a CRC-32 over bytes [start, end)."""
    if start == end:
        return crc
    buffer = memoryview(bytearray(min(BUFFER, end - start)))
    while start < end:
        count = os.preadv(fd, [buffer[: min(len(buffer), end - start)]], start)
        if count == 0:
            break
        crc = isal_zlib.crc32(buffer[:count], crc)
        start += count
    return crc
