"""
Where every element of every tensor lies on disk.

A shard, whoever wrote it, is a run of the tensor's elements in row-major order: an FSDP1 flat shard
cuts anywhere, Shard(0) cuts on rows, a full tensor is one run. So an index of runs ("extents")
describes nearly every format, and resharding is arithmetic on intervals. What is left over, column
shards (Shard(1), tensor parallel) and transposed storages, is a `Block`: a box of the tensor with
the strides it is stored with. Nothing here touches torch or reads a file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple, TypeAlias

from fsdp_migrate.checkpoint.dtypes import DTYPES, DType
from fsdp_migrate.errors import Incomplete

Shape: TypeAlias = tuple[int, ...]


class Item(NamedTuple):
    """
    One item of a `.distcp` file, for tensor `key`: `path[offset:offset + length]`.

    Where its payload begins is known only after opening it, which is left until the bytes are
    wanted: a checkpoint of a large model has millions of them.
    """

    path: Path
    offset: int
    length: int
    key: str = ""


Store: TypeAlias = Path | Item


class Extent(NamedTuple):
    """Elements [start, stop) of a tensor in row-major order, from byte `offset` of `store` on."""

    start: int
    stop: int
    store: Store
    offset: int


class Block(NamedTuple):
    """
    A box of a tensor: `sizes` elements from index `offsets` on, stored with `strides` (in
    elements); its first element is at byte `offset` of `store`.
    """

    offsets: Shape
    sizes: Shape
    store: Store
    offset: int
    strides: Shape


Piece: TypeAlias = Extent | Block


@dataclass(frozen=True, slots=True)
class Tensor:
    """
    A tensor of `shape` (torch's order) and `dtype` (torch's name), and the pieces that hold it.

    The pieces cover every element exactly once: a hole, an overlap or a wrong size raises
    `Incomplete`, so a Tensor that exists can be read. `origin` is what the source called it.
    """

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.origin:
            object.__setattr__(self, "origin", self.name)
        if all(isinstance(piece, Extent) for piece in self.pieces):
            object.__setattr__(self, "pieces", _chained(self))
        else:
            _check_blocks(self)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> DType:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.type.bytes

    @property
    def contiguous(self) -> bool:
        """Whether every piece is a row-major run."""
        return all(isinstance(piece, Extent) for piece in self.pieces)

    def between(self, start: int, stop: int) -> Iterator[Extent]:
        """The stored runs of elements [start, stop), trimmed; only for `contiguous` tensors."""
        size = self.type.bytes
        extents: Sequence[Extent] = self.pieces  # type: ignore[assignment]
        first = max(bisect_right(extents, start, key=lambda extent: extent.start) - 1, 0)
        for extent in extents[first:]:
            if extent.start >= stop:
                return
            low, high = max(start, extent.start), min(stop, extent.stop)
            if low < high:
                offset = extent.offset + (low - extent.start) * size
                yield Extent(low, high, extent.store, offset)


@lru_cache(maxsize=4096)  # millions of pieces have a few shapes
def row_major(shape: Shape) -> Shape:
    """The strides (in elements) of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def is_run(shape: Shape, sizes: Shape) -> bool:
    """Whether a box of a tensor is one row-major run: one cut dimension, only ones before it."""
    cut = 0
    while cut < len(shape) and sizes[cut] == 1:
        cut += 1
    return all(sizes[dim] == shape[dim] for dim in range(cut + 1, len(shape)))


def piece(
    shape: Shape, offsets: Shape, sizes: Shape, strides: Shape, store: Store, offset: int
) -> Piece:
    """The simplest piece for a box: an `Extent` where it is one run stored as one run."""
    packed = row_major(sizes)
    plain = strides == packed or all(
        size == 1 or stride == want
        for size, stride, want in zip(sizes, strides, packed, strict=True)
    )
    if 0 in sizes or (plain and is_run(shape, sizes)):
        start = sum(o * s for o, s in zip(offsets, row_major(shape), strict=True))
        return Extent(start, start + math.prod(sizes), store, offset)
    return Block(offsets, sizes, store, offset, strides)


def boxes_of_run(start: int, stop: int, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """
    Elements [start, stop) of a row-major `shape` as boxes (offsets, sizes), in order.

    At most 2 * len(shape) - 1 of them: a ragged head, whole rows, a ragged tail.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,) if shape else ()), ((stop - start,) if shape else ())
        return
    row = math.prod(shape[1:])
    head, tail = start // row, stop // row
    if head == tail:
        for offsets, sizes in boxes_of_run(start - head * row, stop - head * row, shape[1:]):
            yield (head, *offsets), (1, *sizes)
        return
    if start % row:
        for offsets, sizes in boxes_of_run(start - head * row, row, shape[1:]):
            yield (head, *offsets), (1, *sizes)
        head += 1
    if head < tail:
        yield (head, *(0 for _ in shape[1:])), (tail - head, *shape[1:])
    if stop % row:
        for offsets, sizes in boxes_of_run(0, stop - tail * row, shape[1:]):
            yield (tail, *offsets), (1, *sizes)


def _chained(tensor: Tensor) -> tuple[Extent, ...]:
    """The extents in order, touching, covering the tensor."""
    extents: Iterable[Extent] = tensor.pieces  # type: ignore[assignment]
    ordered = tuple(
        sorted((e for e in extents if e.start < e.stop), key=lambda extent: extent.start)
    )
    reached = 0
    for extent in ordered:
        if extent.start != reached:
            fault = "is missing" if extent.start > reached else "is stored twice"
            place = min(reached, extent.start)
            raise Incomplete(
                f"{tensor.name}: element {place} {fault} (next piece: elements {extent.start} to "
                f"{extent.stop}, in {_name(extent.store)})"
            )
        reached = extent.stop
    if reached != tensor.numel:
        raise Incomplete(
            f"{tensor.name}: {reached} elements are stored, shape {list(tensor.shape)} has "
            f"{tensor.numel}"
        )
    return ordered


def _check_blocks(tensor: Tensor) -> None:
    """Cut the tensor at every piece's edges: each cell of that grid must be held exactly once."""
    boxes = list(_boxes(tensor))
    for offsets, sizes in boxes:
        if any(o + s > n for o, s, n in zip(offsets, sizes, tensor.shape, strict=True)):
            raise Incomplete(
                f"{tensor.name}: a piece at {list(offsets)} of size {list(sizes)} does not fit "
                f"into shape {list(tensor.shape)}"
            )
    if tensor.numel == 0:
        return
    cuts = []
    for dim, size in enumerate(tensor.shape):
        edges = {0, size}
        for offsets, sizes in boxes:
            edges.update((offsets[dim], offsets[dim] + sizes[dim]))
        cuts.append(sorted(edges))
    places = [{edge: position for position, edge in enumerate(edges)} for edges in cuts]
    seen: set[Shape] = set()
    for offsets, sizes in boxes:
        spans = [
            range(place[o], place[o + s])
            for place, o, s in zip(places, offsets, sizes, strict=True)
        ]
        for cell in product(*spans):
            if cell in seen:
                at = [edges[c] for edges, c in zip(cuts, cell, strict=True)]
                raise Incomplete(f"{tensor.name}: element {at} is stored twice")
            seen.add(cell)
    if len(seen) != math.prod(len(edges) - 1 for edges in cuts):
        cells = product(*(range(len(list(pairwise(edges)))) for edges in cuts))
        hole = next(cell for cell in cells if cell not in seen)
        at = [edges[c] for edges, c in zip(cuts, hole, strict=True)]
        raise Incomplete(f"{tensor.name}: element {at} is missing")


def _boxes(tensor: Tensor) -> Iterator[tuple[Shape, Shape]]:
    for part in tensor.pieces:
        if isinstance(part, Block):
            yield part.offsets, part.sizes
        else:
            yield from boxes_of_run(part.start, part.stop, tensor.shape)


def _name(store: Store) -> str:
    return store.path.name if isinstance(store, Item) else store.name
