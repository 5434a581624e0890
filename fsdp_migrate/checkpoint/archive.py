"""
The zip archives that torch.save writes: where each record's bytes lie.

An archive is a whole `.pt` file or one item of a `.distcp` file: a window of a file. Records are
stored, never compressed, below one top folder (source: files of torch 1.13.1 to 2.15.0). Every
structure is checked against its neighbours before anything in it is believed, because a truncated
or damaged file must be an error here and not wrong weights later.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.errors import Corrupt, Incomplete, SourceError, Unsupported

_END = struct.Struct("<4s4H2LH")  # end of central directory
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")  # central directory entry
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x1
_ZIP64_EXTRA = 1
_LARGEST_PICKLE = 1 << 30  # bytes; a sparse file can claim any size
_TAIL = 1 << 16  # enough for the directory of a small item, so that it costs one read

MAGIC = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Record:
    """`size` bytes at `offset` of the file; `crc` is None where torch did not compute it."""

    offset: int
    size: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class Archive:
    """Records by name, without the top folder ("data.pkl", "data/0")."""

    path: Path
    records: Mapping[str, Record]

    def read(self, fd: int, name: str) -> bytes:
        """A small record's bytes, its CRC-32 checked."""
        try:
            record = self.records[name]
        except KeyError:
            raise Corrupt(f"{self.path}: the archive has no record {name}") from None
        if record.size > _LARGEST_PICKLE:
            raise Corrupt(f"{self.path}: record {name} claims {record.size} bytes")
        data = os.pread(fd, record.size, record.offset)
        if len(data) != record.size:
            raise Corrupt(f"{self.path}: record {name} is cut off")
        if record.crc is not None and zlib.crc32(data) != record.crc:
            raise Corrupt(f"{self.path}: record {name} is damaged (its CRC-32 does not match)")
        return data


def open_file(path: Path) -> int:
    """A read-only descriptor of a regular file; the caller closes it."""
    try:
        # Without O_NONBLOCK opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Incomplete(f"{path}: no such file") from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SourceError(f"{path}: not a regular file")
    return fd


def index_archive(path: Path, fd: int, start: int = 0, length: int | None = None) -> Archive:
    """The records of the archive in `length` bytes from `start` on (by default the whole file)."""
    if length is None:
        length = os.fstat(fd).st_size - start
    window = _Window(path, fd, start, length)
    where, size, count = window.directory()
    records: dict[str, Record] = {}
    for name, record in window.entries(where, size, count):
        _, _, short = name.partition("/")
        if not short or short in records:
            raise Corrupt(f"{path}: record {name!r} has no place in a torch archive")
        records[short] = record
    order = records.get("byteorder")
    archive = Archive(path, records)
    if order is not None and archive.read(fd, "byteorder") != b"little":
        raise Unsupported(f"{path}: written on a big-endian machine, which is not supported")
    return archive


@dataclass(frozen=True, slots=True)
class _Window:
    path: Path
    fd: int
    start: int
    length: int

    def bytes_at(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.length:
            raise self.corrupt("a structure reaches past the end: the file is truncated")
        data = os.pread(self.fd, size, self.start + offset)
        if len(data) != size:
            raise self.corrupt("the file is truncated")
        return data

    def corrupt(self, why: str) -> Corrupt:
        return Corrupt(f"{self.path}: not a whole torch archive: {why}")

    def directory(self) -> tuple[int, int, int]:
        """Offset, size and entry count of the central directory."""
        if self.length < _END.size:
            raise self.corrupt(f"only {self.length} bytes")
        tail_start = max(0, self.length - _END.size - _TAIL)
        tail = self.bytes_at(tail_start, self.length - tail_start)
        # torch writes no archive comment, so the end record is the very end of the window.
        end = len(tail) - _END.size
        signature, disk, _, _, count, size, offset, comment = _END.unpack_from(tail, end)
        if signature != b"PK\x05\x06" or comment or disk not in (0, _MAX16):
            raise self.corrupt("its end record is missing, as in a file cut off while written")
        end += tail_start
        if offset + size == end:
            return offset, size, count
        return self._directory64(end, count, size, offset)

    def _directory64(self, end: int, *short: int) -> tuple[int, int, int]:
        """torch writes the zip64 end record always; the short one repeats it, or overflows."""
        signature, _, where, _ = _LOCATOR64.unpack(
            self.bytes_at(end - _LOCATOR64.size, _LOCATOR64.size)
        )
        if signature != b"PK\x06\x07" or where + _END64.size != end - _LOCATOR64.size:
            raise self.corrupt("the directory does not end where its end record says")
        fields = _END64.unpack(self.bytes_at(where, _END64.size))
        count, size, offset = fields[7:10]
        limits = zip((count, size, offset), short, (_MAX16, _MAX32, _MAX32), strict=True)
        agree = all(given in (value, limit) for value, given, limit in limits)
        if fields[0] != b"PK\x06\x06" or not agree or offset + size != where:
            raise self.corrupt("its zip64 end record is damaged")
        return offset, size, count

    def entries(self, where: int, size: int, count: int) -> Iterator[tuple[str, Record]]:
        directory = self.bytes_at(where, size)
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > size:
                raise self.corrupt("its directory is shorter than the end record says")
            fields = _ENTRY.unpack_from(directory, at)
            flags, method, crc, packed, plain = fields[3], fields[4], *fields[7:10]
            name_size, extra_size, comment_size = fields[10:13]
            local = fields[16]
            if fields[0] != b"PK\x01\x02":
                raise self.corrupt("its directory is damaged")
            name_at = at + _ENTRY.size
            name = directory[name_at : name_at + name_size]
            extra = directory[name_at + name_size : name_at + name_size + extra_size]
            at = name_at + name_size + extra_size + comment_size
            if at > size:
                raise self.corrupt("its directory is damaged")
            plain, packed, local = self._wide(extra, plain, packed, local)
            if method != 0 or flags & _ENCRYPTED or plain != packed:
                raise Unsupported(
                    f"{self.path}: record {name!r} is compressed or encrypted; torch stores plainly"
                )
            try:
                text = name.decode("utf-8")
            except UnicodeDecodeError:
                raise self.corrupt(f"record name {name!r} is not UTF-8") from None
            data = self._data_offset(local, name, where, plain)
            known = None if crc == 0 and plain else crc
            yield text, Record(self.start + data, plain, known)
        if at != size:
            raise self.corrupt("its directory is longer than the end record says")

    def _wide(self, extra: bytes, plain: int, packed: int, local: int) -> tuple[int, int, int]:
        """Values of 4 GiB and more stand in a zip64 extra field, only those that overflowed."""
        if _MAX32 not in (plain, packed, local):
            return plain, packed, local
        at = 0
        while at + 4 <= len(extra):
            tag, size = struct.unpack_from("<2H", extra, at)
            if tag == _ZIP64_EXTRA:
                values = iter(struct.unpack_from(f"<{size // 8}Q", extra[: at + 4 + size], at + 4))
                try:
                    plain = next(values) if plain == _MAX32 else plain
                    packed = next(values) if packed == _MAX32 else packed
                    local = next(values) if local == _MAX32 else local
                except StopIteration:
                    break
                return plain, packed, local
            at += 4 + size
        raise self.corrupt("a record of over 4 GiB lacks its zip64 sizes")

    def _data_offset(self, local: int, name: bytes, directory: int, size: int) -> int:
        """Where a record's data begins: behind its local header, whose padding only it knows."""
        header = self.bytes_at(local, _LOCAL.size + len(name))
        fields = _LOCAL.unpack_from(header)
        same = fields[0] == MAGIC and fields[9] == len(name) and header[_LOCAL.size :] == name
        if not same:
            raise self.corrupt(f"record {name!r} has no header where the directory says")
        data: int = local + _LOCAL.size + len(name) + fields[10]
        if data + size > directory:
            raise self.corrupt(f"record {name!r} reaches into the directory")
        return data
