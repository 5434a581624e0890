"""
The layout of a torch.save file, before any of its bytes exist.

A zip archive of stored (never compressed) members: `data.pkl`, `byteorder`, one `data/N` for each
storage, `version`, `.data/serialization_id`; those are the members torch 2.6 writes, and every
later torch reads. Storages begin at multiples of 64 bytes, so that `mmap=True` can view them. The
sizes are known before the bytes are, so no data descriptors are needed; the CRC-32 of copied bytes
is filled in afterwards (`Copy.crc_at`). Sizes and offsets from 4 GiB on use zip64.
Format facts: PKWARE's APPNOTE 4.3 and 4.5.3; caffe2's serializer (padding in an extra field "FB").
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.plan import Copy, Literal, Part
from fsdp_migrate.checkpoint.tensors import Tensor

ALIGNMENT = 64
_U32, _U16 = 0xFFFFFFFF, 0xFFFF
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_END64, _LOCATOR, _END = b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"
_ZIP64 = 0x0001
_PADDING = b"FB"
_LONG_AGO = (0, 0x21)  # time, date: 1980-01-01, the earliest a zip can say
_CRC_IN_LOCAL, _CRC_IN_CENTRAL = 14, 16


class Run(NamedTuple):
    """Elements [start, stop) of a tensor, written as `dtype`: the bytes of one storage."""

    tensor: Tensor
    start: int
    stop: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.dtype].bytes


Payload: TypeAlias = bytes | Run


@dataclass(frozen=True, slots=True)
class Archive:
    """
    Where everything of an archive lies, apart from which tensor fills its storages.

    `segments` alternate with the storages that have bytes to copy, and there is one more of them;
    each is (offset, bytes). `holes[i]` is the offset of the i-th such storage, and `crcs[i]` are
    the two places its CRC-32 goes to.
    """

    size: int
    segments: tuple[tuple[int, bytes], ...]
    holes: tuple[int, ...]
    crcs: tuple[tuple[int, int], ...]

    def parts(self, runs: Sequence[Run], at: int = 0) -> list[Part]:
        """The archive at byte `at` of a file, its holes filled by `runs`."""
        parts: list[Part] = []
        for (offset, data), hole, crc, run in zip(
            self.segments, self.holes, self.crcs, runs, strict=False
        ):
            parts.append(Literal(at + offset, data))
            places = (at + crc[0], at + crc[1])
            parts.append(Copy(run.tensor, run.start, run.stop, at + hole, run.dtype, places))
        offset, data = self.segments[-1]
        parts.append(Literal(at + offset, data))
        return parts


def archive(pickle: bytes, storages: Sequence[bytes | int], root: str = "archive") -> Archive:
    """
    Lay out a torch.save file: `storages[i]` becomes `data/i`, given as its bytes, or as their
    number where they are to be copied in (a hole).
    """
    layout = _Layout(root)
    layout.member("data.pkl", pickle)
    layout.member("byteorder", b"little")
    for number, storage in enumerate(storages):
        layout.member(f"data/{number}", storage or b"", align=True)
    layout.member("version", b"3\n")
    layout.member(".data/serialization_id", _serialization_id(pickle, storages))
    return layout.finish()


def parts_of(
    pickle: bytes, storages: Sequence[Payload], root: str = "archive"
) -> tuple[list[Part], int]:
    """A whole torch.save file as a plan's parts, and its size in bytes."""
    runs = [storage for storage in storages if isinstance(storage, Run) and storage.nbytes]
    layout = archive(pickle, [s.nbytes if isinstance(s, Run) else s for s in storages], root)
    return layout.parts(runs), layout.size


class _Layout:
    """Members appended one after the other; literal bytes gather until a hole interrupts them."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._pending = bytearray()
        self._pending_at = 0
        self._segments: list[tuple[int, bytes]] = []
        self._holes: list[int] = []
        self._local_crcs: list[int] = []
        self._hole_entries: list[int] = []
        self._entries: list[bytes] = []

    @property
    def _position(self) -> int:
        return self._pending_at + len(self._pending)

    def member(self, name: str, data: bytes | int, *, align: bool = False) -> None:
        path = f"{self._root}/{name}".encode()
        size = data if isinstance(data, int) else len(data)
        crc = 0 if isinstance(data, int) else zlib.crc32(data)
        header_at = self._position
        extra = _zip64(size, size) if size >= _U32 else b""
        if align:
            extra += _padding(header_at + 30 + len(path) + len(extra))
        small = min(size, _U32)
        fields = (*_LONG_AGO, crc, small, small, len(path))
        needs = 45 if size >= _U32 else 20
        header = struct.pack("<4sHHHHHIIIHH", _LOCAL, needs, 0, 0, *fields, len(extra))
        self._pending += header + path + extra
        self._entries.append(_central(needs, fields, size, header_at, path))
        if isinstance(data, bytes):
            self._pending += data
            return
        self._segments.append((self._pending_at, bytes(self._pending)))
        self._holes.append(self._position)
        self._local_crcs.append(header_at + _CRC_IN_LOCAL)
        self._hole_entries.append(len(self._entries) - 1)
        self._pending_at = self._position + size
        self._pending = bytearray()

    def finish(self) -> Archive:
        directory_at = self._position
        starts = []
        for entry in self._entries:
            starts.append(self._position)
            self._pending += entry
        count, size = len(self._entries), self._position - directory_at
        if count >= _U16 or size >= _U32 or directory_at >= _U32:
            end_at = self._position
            self._pending += struct.pack(
                "<4sQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, size, directory_at
            )
            self._pending += struct.pack("<4sIQI", _LOCATOR, 0, end_at, 1)
        few, small, near = min(count, _U16), min(size, _U32), min(directory_at, _U32)
        self._pending += struct.pack("<4sHHHHIIH", _END, 0, 0, few, few, small, near, 0)
        self._segments.append((self._pending_at, bytes(self._pending)))
        central = (starts[entry] + _CRC_IN_CENTRAL for entry in self._hole_entries)
        crcs = tuple(zip(self._local_crcs, central, strict=True))
        return Archive(self._position, tuple(self._segments), tuple(self._holes), crcs)


def _central(needs: int, fields: tuple[int, ...], size: int, header_at: int, path: bytes) -> bytes:
    # The zip64 field of the central directory holds, in this order, only what does not fit.
    large = [size, size] if size >= _U32 else []
    if header_at >= _U32:
        large.append(header_at)
    extra = _zip64(*large) if large else b""
    tail = (len(extra), 0, 0, 0, 0, min(header_at, _U32))
    needs = 45 if large else needs
    return struct.pack("<4sHHHHHHIIIHHHHHII", _CENTRAL, needs, needs, 0, 0, *fields, *tail) + (
        path + extra
    )


def _zip64(*values: int) -> bytes:
    return struct.pack(f"<HH{len(values)}Q", _ZIP64, 8 * len(values), *values)


def _padding(end: int) -> bytes:
    """An extra field that moves the data from byte `end` to a multiple of the alignment."""
    fill = -(end + 4) % ALIGNMENT
    return _PADDING + struct.pack("<H", fill) + b"Z" * fill


def _serialization_id(pickle: bytes, storages: Sequence[bytes | int]) -> bytes:
    """40 digits, as torch's; of what is known before the bytes are, so the same plan repeats it."""
    digest = hashlib.sha256(pickle)
    for storage in storages:
        digest.update(storage if isinstance(storage, bytes) else b"%d" % storage)
    return b"%040d" % (int.from_bytes(digest.digest(), "big") % 10**40)
