"""
Fetch elements of a tensor from wherever they lie. The only reader of tensor bytes.

A `Gatherer` is used by one thread. It keeps a few files open and remembers where the items of
`.distcp` files have their payload.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from fsdp_migrate.checkpoint.archive import MAGIC, open_file
from fsdp_migrate.checkpoint.pickles import Stored
from fsdp_migrate.checkpoint.safetensors_header import read_header
from fsdp_migrate.checkpoint.tensors import (
    Block,
    Extent,
    Item,
    Piece,
    Shape,
    Tensor,
    boxes_of_run,
    piece,
    row_major,
)
from fsdp_migrate.checkpoint.torch_file import read_item
from fsdp_migrate.errors import Corrupt, SourceError, Unsupported

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_OPEN_FILES = 64
_KNOWN_ITEMS = 4096


class Gatherer:
    """Use as a context manager: leaving it closes its files."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._items: dict[Item, Stored] = {}
        self._settled: tuple[Tensor, Tensor, bool] | None = None

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def file(self, path: Path) -> int:
        """A descriptor of `path`, open until many others have been asked for."""
        fd = self._files.get(path)
        if fd is None:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            fd = self._files[path] = open_file(path)
        else:
            self._files.move_to_end(path)
        return fd

    def settle(self, tensor: Tensor) -> Tensor:
        """The same tensor with every item opened: all stores are files, with final offsets."""
        if self._settled is not None and self._settled[0] is tensor:
            return self._settled[1]
        if any(isinstance(part.store, Item) for part in tensor.pieces):
            pieces = tuple(self._settle(tensor, part) for part in tensor.pieces)
            settled = Tensor(tensor.name, tensor.dtype, tensor.shape, pieces, tensor.origin)
        else:
            settled = tensor
        self._settled = tensor, settled, settled.contiguous
        return settled

    def read(self, tensor: Tensor, start: int = 0, stop: int | None = None) -> bytes:
        """Elements [start, stop) in row-major order; for small amounts."""
        stop = tensor.numel if stop is None else stop
        buffer = bytearray((stop - start) * tensor.type.bytes)
        self.read_into(tensor, start, stop, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, tensor: Tensor, start: int, stop: int, buffer: memoryview) -> None:
        """Fill `buffer` with elements [start, stop) in row-major order."""
        settled = self.settle(tensor)
        size = settled.type.bytes
        assert self._settled is not None
        if self._settled[2]:
            for run in settled.between(start, stop):
                assert isinstance(run.store, Path)
                low = (run.start - start) * size
                self._fill(run.store, run.offset, buffer[low : low + (run.stop - run.start) * size])
        else:
            self._gather(settled, start, stop, buffer)

    def _fill(self, path: Path, offset: int, target: memoryview) -> None:
        fd, done = self.file(path), 0
        while done < len(target):
            try:
                count = os.preadv(fd, [target[done:]], offset + done)
            except OSError as error:
                raise SourceError(f"{path}: {error.strerror}") from None
            if count == 0:
                raise Corrupt(f"{path}: ends at byte {offset + done}, in the middle of a tensor")
            done += count

    def _gather(self, tensor: Tensor, start: int, stop: int, buffer: memoryview) -> None:
        """
        The slow way, for column shards and transposed storages: box by box.

        The wanted run falls into a few boxes; each is filled from every piece that meets it.
        """
        import numpy as np

        size = tensor.type.bytes
        flat = np.frombuffer(buffer, np.uint8)
        done = 0
        for offsets, sizes in boxes_of_run(start, stop, tensor.shape):
            count = math.prod(sizes) * size
            target = flat[done : done + count].reshape(*sizes, size)
            for part in tensor.pieces:
                for held in _as_blocks(part, tensor.shape, size):
                    self._copy_meeting(held, offsets, sizes, target, size)
            done += count

    def _copy_meeting(
        self, held: Block, offsets: Shape, sizes: Shape, target: Bytes, size: int
    ) -> None:
        """Copy what `held` and the box (offsets, sizes) have in common into `target`."""
        low = tuple(map(max, held.offsets, offsets))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(held.offsets, held.sizes, offsets, sizes, strict=True)
        )
        extent = tuple(end - begin for begin, end in zip(low, ends, strict=True))
        if any(count <= 0 for count in extent):
            return
        assert isinstance(held.store, Path)
        inner = tuple(a - b for a, b in zip(low, held.offsets, strict=True))
        first = held.offset + size * sum(i * s for i, s in zip(inner, held.strides, strict=True))
        place = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offsets, extent, strict=True))
        self._copy_box(held.store, first, held.strides, target[place], size)

    def _copy_box(self, path: Path, first: int, strides: Shape, target: Bytes, size: int) -> None:
        """Read `target`'s elements, stored with `strides` from byte `first`, run by stored run."""
        import numpy as np

        sizes = target.shape[:-1]
        # The dimensions that are contiguous in the file, innermost first, make one read.
        order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], -dim))
        run, merged = 1, []
        for dim in order:
            if sizes[dim] != 1 and strides[dim] != run:
                break
            merged.append(dim)
            run *= sizes[dim]
        inner = sorted(merged, key=lambda dim: -strides[dim])
        outer = [dim for dim in range(len(sizes)) if dim not in merged]
        data = np.empty((*(sizes[dim] for dim in inner), size), np.uint8)
        view = target.transpose(*outer, *inner, len(sizes))
        for at in product(*(range(sizes[dim]) for dim in outer)):
            skipped = sum(i * strides[dim] for i, dim in zip(at, outer, strict=True))
            self._fill(path, first + skipped * size, data.reshape(-1).data)
            view[at] = data

    def _settle(self, tensor: Tensor, part: Piece) -> Piece:
        item = part.store
        if not isinstance(item, Item):
            return part
        stored = self._open(item)
        where = f"{item.path}, item {item.key or tensor.origin} at byte {item.offset}"
        if stored.dtype != tensor.dtype:
            raise Corrupt(f"{where}: dtype {stored.dtype}, the metadata says {tensor.dtype}")
        if isinstance(part, Block):
            boxes = [(part.offsets, part.sizes)]
        else:
            boxes = list(boxes_of_run(part.start, part.stop, tensor.shape))
        if part.offset == 0 and len(boxes) == 1 and boxes[0][1] == stored.shape:
            offsets, sizes = boxes[0]
            return piece(tensor.shape, offsets, sizes, stored.strides, stored.path, stored.offset)
        # A stretch of a flat parameter's chunk, which un-flattening has cut out.
        size = tensor.type.bytes
        flat = len(stored.shape) == 1 and stored.strides == (1,) and isinstance(part, Extent)
        if not flat or part.offset + (part.stop - part.start) * size > stored.shape[0] * size:  # type: ignore[union-attr]
            raise Corrupt(f"{where}: has shape {list(stored.shape)}, not what the metadata says")
        return part._replace(store=stored.path, offset=stored.offset + part.offset)

    def _open(self, item: Item) -> Stored:
        stored = self._items.get(item)
        if stored is None:
            fd = self.file(item.path)
            try:
                start = os.pread(fd, 4, item.offset)
            except OSError as error:
                raise SourceError(f"{item.path}: {error.strerror}") from None
            if start == MAGIC:
                stored = read_item(item, fd).tree
            else:
                stored = self._open_safetensors(item, fd)
            if not isinstance(stored, Stored):
                raise Corrupt(f"{item.path}: the item at byte {item.offset} is not a tensor")
            if len(self._items) >= _KNOWN_ITEMS:
                self._items.clear()
            self._items[item] = stored
        return stored

    def _open_safetensors(self, item: Item, fd: int) -> Stored:
        """torch's DCP writer can end a file in one safetensors blob that holds all its tensors."""
        try:
            header = read_header(item.path, fd, item.offset)
        except Corrupt:
            raise Unsupported(
                f"{item.path}: the item at byte {item.offset} ({item.key}) is neither a torch "
                "archive nor safetensors; compressed items are not supported"
            ) from None
        entry = header.entries.get(item.key)
        if entry is None:
            raise Corrupt(f"{item.path}: its safetensors part has no {item.key}")
        return Stored(
            entry.dtype, entry.shape, row_major(entry.shape), item.path, entry.offset, item.key
        )


def _as_blocks(part: Piece, shape: Shape, size: int) -> Iterator[Block]:
    if isinstance(part, Block):
        yield part
        return
    strides = row_major(shape)
    for offsets, sizes in boxes_of_run(part.start, part.stop, shape):
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        yield Block(offsets, sizes, part.store, part.offset + (first - part.start) * size, strides)
