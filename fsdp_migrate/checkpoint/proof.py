"""
Prove a conversion: read the output back and compare every tensor with the source, by hash.

The output is read by the reader of its own format, so the writer is not trusted with its own word.
On the way the source's records are checked against the CRC-32 that torch stored with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash
from isal import isal_zlib

from fsdp_migrate.checkpoint.archive import Record, index_archive
from fsdp_migrate.checkpoint.cast import cast_into
from fsdp_migrate.checkpoint.execute import BUFFER, THREADS, Progress
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.tensors import Item, Piece, Tensor
from fsdp_migrate.errors import Corrupt, TargetError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pair:
    """`source`, cast to `written.dtype`, must be what `written` holds."""

    name: str
    source: Tensor
    written: Tensor


class SameFiles:
    """Tells tensors that lie in the same bytes on disk, through hard links."""

    def __init__(self) -> None:
        self._inodes: dict[Path, tuple[int, int]] = {}

    def hold(self, one: Tensor, other: Tensor) -> bool:
        """Whether both have the same boxes at the same places of the same files."""
        return (
            (one.shape, one.dtype) == (other.shape, other.dtype)
            and len(one.pieces) == len(other.pieces)
            and all(
                self._place(a) == self._place(b)
                for a, b in zip(one.pieces, other.pieces, strict=True)
            )
        )

    def _place(self, part: Piece) -> tuple[object, ...]:
        store = part.store
        path, item = (store.path, store[1:3]) if isinstance(store, Item) else (store, None)
        inode = self._inodes.get(path)
        if inode is None:
            status = path.stat()
            inode = self._inodes[path] = status.st_dev, status.st_ino
        box = part._replace(store=Path())
        return inode, item, box


def prove(pairs: Sequence[Pair], progress: Progress = lambda _: None) -> dict[str, str]:
    """
    The xxh3-128 (hex) of each output tensor's bytes in row-major order.

    Raises `TargetError` for the first pair that differs.
    """
    hashes: dict[str, str] = {}
    lock = threading.Lock()

    def work(pair: Pair) -> None:
        with Gatherer() as gatherer:
            written, source = pair.written, pair.source
            if written.shape != source.shape:
                raise TargetError(
                    f"{pair.name}: was written as {list(written.shape)}, is {list(source.shape)}"
                )
            wanted = digest(source, gatherer, written.dtype, progress)
            found = digest(written, gatherer, written.dtype, progress)
        if wanted != found:
            raise TargetError(
                f"{pair.name}: what was written is not what the source holds (hash {found}, "
                f"expected {wanted}); the output was removed"
            )
        with lock:
            hashes[pair.name] = found

    each(work, sorted(pairs, key=lambda pair: -pair.source.nbytes))
    return {pair.name: hashes[pair.name] for pair in pairs}


def digest(tensor: Tensor, gatherer: Gatherer, dtype: str, progress: Progress) -> str:
    """xxh3-128 of the elements in row-major order, as `dtype`."""
    hasher = xxhash.xxh3_128()
    size = tensor.type.bytes
    step = BUFFER // size
    buffer = memoryview(bytearray(min(step, tensor.numel) * size))
    for start in range(0, tensor.numel, step):
        stop = min(start + step, tensor.numel)
        data = buffer[: (stop - start) * size]
        gatherer.read_into(tensor, start, stop, data)
        progress(len(data))
        hasher.update(data if dtype == tensor.dtype else cast_into(data, tensor.dtype, dtype))
    return hasher.hexdigest()


def check_records(tensors: Iterable[Tensor]) -> None:
    """
    Check the CRC-32 of every archive record that `tensors` lie in; raises `Corrupt` for damage.

    Files without such sums (safetensors) cannot be checked.
    """
    files: dict[Path, set[tuple[int, int | None]]] = {}
    for tensor in tensors:
        for part in tensor.pieces:
            store = part.store
            if isinstance(store, Item):
                files.setdefault(store.path, set()).add((store.offset, store.length))
            elif store not in files:
                files[store] = {(0, None)}
    jobs = [(path, window) for path, windows in files.items() for window in sorted(windows)]
    each(lambda job: _check_archive(job[0], *job[1]), jobs)


def _check_archive(path: Path, start: int, length: int | None) -> None:
    with Gatherer() as gatherer:
        fd = gatherer.file(path)
        if os.pread(fd, 4, start) != b"PK\x03\x04":
            return
        archive = index_archive(path, fd, start, length)
        for name, record in archive.records.items():
            if record.crc is not None and _crc(fd, record) != record.crc:
                raise Corrupt(
                    f"{path}: record {name} is damaged: its bytes do not have the CRC-32 that was "
                    "stored with them"
                )


def _crc(fd: int, record: Record) -> int:
    buffer = memoryview(bytearray(min(BUFFER, record.size)))
    crc, done = 0, 0
    while done < record.size:
        data = buffer[: min(len(buffer), record.size - done)]
        count = os.preadv(fd, [data], record.offset + done)
        if count == 0:
            break
        crc = isal_zlib.crc32(data[:count], crc)
        done += count
    return crc


def each(work: Callable[[T], None], items: Sequence[T]) -> None:
    """Do `work` for every item on a few threads; the first error stops the rest."""
    stopped = threading.Event()

    def guarded(item: T) -> None:
        if stopped.is_set():
            return
        try:
            work(item)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(guarded, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()
