"""
What a conversion will write, byte for byte, before anything is written.

A plan is plain data: output files, each a list of literal bytes and of copies ("elements [start,
stop) of this tensor, row-major, at this offset"). `--dry-run` prints it; the executor obeys it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes made by the writer (headers, pickles, small values) at `offset` of the output file."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """
    Elements [start, stop) of `tensor` in row-major order, as `dtype`, at byte `offset` of the file.

    `crc_at`: byte positions in the same file where the CRC-32 of these bytes belongs, as a
    little-endian u32 (a zip member carries it twice). Written after the bytes.
    """

    tensor: Tensor
    start: int
    stop: int
    offset: int
    dtype: str
    crc_at: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.dtype].bytes


Part: TypeAlias = Literal | Copy


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of exactly `size` bytes at `path` below the output; parts never overlap."""

    path: PurePosixPath
    size: int
    parts: tuple[Part, ...]

    def copies(self) -> Iterator[Copy]:
        return (part for part in self.parts if isinstance(part, Copy))


@dataclass(frozen=True, slots=True)
class Carried:
    """A source file that goes into the output as it is: hard-linked where `link`, else copied."""

    path: PurePosixPath
    source: Path
    link: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """`single_file`: the output itself is the one file, not a folder that holds it."""

    files: tuple[OutputFile, ...]
    carried: tuple[Carried, ...] = ()
    single_file: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def bytes_to_write(self) -> int:
        copied = sum(c.source.stat().st_size for c in self.carried if not c.link)
        return sum(file.size for file in self.files) + copied
