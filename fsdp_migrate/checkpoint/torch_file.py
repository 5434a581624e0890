"""
Read one file of torch.save: its Python tree, with tensors as `Stored` places in the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.archive import MAGIC, Archive, index_archive, open_file
from fsdp_migrate.checkpoint.pickles import Unpickler
from fsdp_migrate.checkpoint.tensors import Item
from fsdp_migrate.errors import Corrupt, SourceError, Unsupported

_LEGACY = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02c", b"\x80\x02}", b"\x80\x03")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """`tree` is what was saved. `records` tells something of the writer's torch version."""

    path: Path
    tree: Any
    archive: Archive


def is_torch_file(path: Path) -> bool:
    """Whether `path` starts like something torch.save wrote, legacy files included."""
    try:
        with path.open("rb") as stream:
            start = stream.read(16)
    except OSError:
        return False
    return start.startswith((MAGIC, *_LEGACY))


def read_torch_file(path: Path) -> TorchFile:
    """Raises `Corrupt`, `Forbidden` or `Unsupported`; reads no tensor's bytes."""
    fd = open_file(path)
    try:
        start = os.pread(fd, 16, 0)
        if start.startswith(_LEGACY):
            raise Unsupported(
                f"{path}: a file in torch's format from before 1.6 (no zip archive). Load it with "
                "torch.load and save it again with torch.save, then convert that"
            )
        if not start.startswith(MAGIC):
            raise Corrupt(f"{path}: not a file of torch.save (it starts with {start[:4]!r})")
        return _read(path, fd, 0, None)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    finally:
        os.close(fd)


def read_item(item: Item, fd: int) -> TorchFile:
    """The archive that one item of a `.distcp` file is."""
    if os.pread(fd, 4, item.offset) != MAGIC:
        raise Unsupported(
            f"{item.path}: the item at byte {item.offset} is not a torch archive; compressed items "
            "are not supported"
        )
    return _read(item.path, fd, item.offset, item.length)


def _read(path: Path, fd: int, start: int, length: int | None) -> TorchFile:
    archive = index_archive(path, fd, start, length)

    def storage(key: str) -> tuple[int, int]:
        record = archive.records.get(f"data/{key}")
        if record is None:
            raise Corrupt(f"{path}: storage {key} has no record in the archive")
        return record.offset, record.size

    tree = Unpickler(archive.read(fd, "data.pkl"), path, storage).load()
    return TorchFile(path, tree, archive)
