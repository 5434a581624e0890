"""
Prove a conversion: read the output back and compare every tensor with the source, by hash.

The output is read by the reader of its own format, so the writer is not trusted with its own word.
On the way the records of both are checked against the CRC-32 stored with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash
from isal import isal_zlib

from fsdp_migrate.checkpoint.cast import cast_into
from fsdp_migrate.checkpoint.execute import BUFFER, Progress, in_threads
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.records import Records, Stretch
from fsdp_migrate.checkpoint.tensors import Extent, Item, Piece, Tensor
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

    Raises `TargetError` for the first pair that differs, `Corrupt` for a damaged source.
    """
    hashes: dict[str, str] = {}
    sources = Records(pair.source for pair in pairs)
    outputs = Records(pair.written for pair in pairs)

    def work(pair: Pair, gatherer: Gatherer) -> None:
        written, source = pair.written, pair.source
        if written.shape != source.shape:
            raise TargetError(
                f"{pair.name}: was written as {list(written.shape)}, is {list(source.shape)}"
            )
        wanted = digest(source, gatherer, written.dtype, progress, sources)
        found = digest(written, gatherer, written.dtype, progress, outputs)
        if wanted != found:
            raise TargetError(
                f"{pair.name}: what was written is not what the source holds (hash {found}, "
                f"expected {wanted}); the output was removed"
            )
        hashes[pair.name] = found

    each(work, sorted(pairs, key=lambda pair: -pair.source.nbytes))
    each(sources.check, sources.paths)
    try:
        each(outputs.check, outputs.paths)
    except Corrupt as error:
        raise TargetError(f"what was written is damaged, and was removed: {error}") from None
    return {pair.name: hashes[pair.name] for pair in pairs}


def digest(
    tensor: Tensor,
    gatherer: Gatherer,
    dtype: str,
    progress: Progress,
    records: Records | None = None,
) -> str:
    """xxh3-128 of the elements in row-major order, as `dtype`; `records` learn what was read."""
    hasher = xxhash.xxh3_128()
    size = tensor.type.bytes
    step = BUFFER // size
    buffer = memoryview(bytearray(min(step, tensor.numel) * size))
    for low, high, run in _runs(gatherer.settle(tensor)):
        summed, crc = run is not None and records is not None and run.store in records, 0
        for start in range(low, high, step):
            stop = min(start + step, high)
            data = buffer[: (stop - start) * size]
            gatherer.read_into(tensor, start, stop, data)
            progress(len(data))
            hasher.update(data if dtype == tensor.dtype else cast_into(data, tensor.dtype, dtype))
            if summed:
                crc = isal_zlib.crc32(data, crc)
        if run is not None and records is not None and isinstance(run.store, Path) and summed:
            records.note(run.store, Stretch(run.offset, (high - low) * size, crc))
    return hasher.hexdigest()


def _runs(tensor: Tensor) -> Iterator[tuple[int, int, Extent | None]]:
    """Its stretches of elements [start, stop): as they are stored, or all in one."""
    if not tensor.contiguous:
        yield 0, tensor.numel, None
        return
    for part in tensor.pieces:
        assert isinstance(part, Extent)
        yield part.start, part.stop, part


def equal_options(one: object, other: object, gatherer: Gatherer) -> bool:
    """
    Whether two values of a param group are the same; a small tensor (`lr`) is read.

    Lists and tuples are not told apart: formats differ in which they can hold.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and gatherer.read(one) == gatherer.read(other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(
            equal_options(a, b, gatherer) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)


def each(work: Callable[[T, Gatherer], None], items: Iterable[T]) -> None:
    """Do `work` for every item on a few threads, a Gatherer each; the first error stops all."""
    waiting, lock, stopped = iter(items), threading.Lock(), threading.Event()

    def worker() -> None:
        with Gatherer() as gatherer:
            while not stopped.is_set():
                with lock:
                    item = next(waiting, None)
                if item is None:
                    return
                work(item, gatherer)

    in_threads(worker, stopped)
