"""
From DCP to DCP without copying a tensor: a new `.metadata` over the old data files.

An item doesn't know its name, so renaming, other key styles, leaving the optimizer out and filling
in options touch `.metadata` alone, and plain values, which are small and written anew into one more
data file. The old data files are hard-linked: they are the same files on disk, so whoever changes
one in place changes both (`--copy` avoids that). DCP itself never does; it writes new files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.plan import Carried, Literal, OutputFile, Plan
from fsdp_migrate.checkpoint.tensors import Block, Item, Piece, Shape, Tensor, boxes_of_run
from fsdp_migrate.checkpoint.writers.dcp import NAME, DataFile, empty_chunk, with_filled_options
from fsdp_migrate.checkpoint.writers.dcp_keys import Named, directories, homeless_extras
from fsdp_migrate.checkpoint.writers.dcp_metadata import (
    Entry,
    StoredChunk,
    StoredItem,
    StoredTensor,
    metadata,
)
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.checkpoint.writers.parameter_dtype import decide
from fsdp_migrate.checkpoint.writers.torch import extras_note

_VALUES = "__values_0.distcp"
_ARCHIVE = b"PK\x03\x04"


def obstacle(index: Index, options: TargetOptions, originals: Iterable[Tensor]) -> str | None:
    """
    Why the data files cannot be used as they are; None if they can.

    `originals` are the tensors as the DCP reader gave them, where every piece is a whole item;
    after un-flattening a piece may be a part of one, which `.metadata` cannot say. Reads four bytes
    of every data file.
    """
    if options.world_size is not None:
        return f"chunks are to be cut for {options.world_size} ranks"
    dtypes = decide(index, options).dtypes
    whole = {tensor.pieces[0].store: tensor for tensor in originals if tensor.pieces}
    files: dict[Path, Item] = {}
    leaves = (leaf for named in directories(index, options.keys).values() for leaf in named)
    for tensor in (leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)):
        if not tensor.pieces:
            continue
        store = tensor.pieces[0].store
        original = whole.get(store)
        if not isinstance(store, Item) or original is None:
            return f"{tensor.name} does not come from a DCP directory"
        if (original.shape, original.dtype) != (tensor.shape, tensor.dtype) or (
            original.pieces is not tensor.pieces and original.pieces != tensor.pieces
        ):
            return f"{tensor.name} is only a part of {original.name}"
        for part in tensor.pieces:
            if isinstance(part.store, Item):
                files.setdefault(part.store.path, part.store)
    for name, tensor in index.model.items():
        if dtypes[name] != tensor.dtype:
            return f"{name} is to be cast to {dtypes[name]}"
    for path, item in files.items():
        with path.open("rb") as file:
            file.seek(item.offset)
            if file.read(len(_ARCHIVE)) != _ARCHIVE:
                return f"{path.name} holds items of another kind than torch.save's"
    return None


def plan(index: Index, options: TargetOptions) -> Plan:
    """Lay out the directory over the data files of its source; `obstacle` must be None."""
    options.only(NAME, "keys")
    index, notes = with_filled_options(index)
    files: list[OutputFile] = []
    carried: list[Carried] = []
    for folder, leaves in directories(index, options.keys).items():
        linked = _Linked()
        entries = {leaf.key: linked.entry(leaf) for leaf in leaves}
        if linked.new.size:
            path = PurePosixPath(folder, linked.new.name)
            files.append(OutputFile(path, linked.new.size, tuple(linked.new.parts)))
        content = metadata(entries, {leaf.key: leaf.path for leaf in leaves})
        path = PurePosixPath(folder, ".metadata")
        files.append(OutputFile(path, len(content), (Literal(0, content),)))
        for source, name in linked.names.items():
            carried.append(Carried(PurePosixPath(folder, name), source, link=not options.copy))
    return Plan(
        tuple(files),
        tuple(carried),
        notes=(*notes, *extras_note(homeless_extras(index, options.keys))),
    )


@dataclass(slots=True)
class _Linked:
    """One output directory: old data files by the name they get in it, and the new one's items."""

    names: dict[Path, str] = field(default_factory=dict)
    new: DataFile = field(default_factory=lambda: DataFile(_VALUES))
    _taken: set[str] = field(default_factory=lambda: {_VALUES})

    def entry(self, leaf: Named) -> Entry:
        value = leaf.value
        if leaf.step:
            return StoredTensor("float32", (), [self.new.step(value)])  # type: ignore[arg-type]
        if not isinstance(value, Tensor):
            return self.new.value(value)
        if not value.pieces:
            return StoredTensor(value.dtype, value.shape, [empty_chunk(self.new, value)])
        chunks = [self._chunk(part, value.shape) for part in value.pieces]
        return StoredTensor(value.dtype, value.shape, chunks)

    def _chunk(self, part: Piece, shape: Shape) -> StoredChunk:
        offsets, sizes = _box(part, shape)
        item: Item = part.store  # type: ignore[assignment]
        name = self.names.get(item.path) or self._name(item.path)
        return StoredChunk(offsets, sizes, StoredItem(name, item.offset, item.length))

    def _name(self, path: Path) -> str:
        name = path.name
        stem, number = path.stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}{number}{path.suffix}"
        self._taken.add(name)
        self.names[path] = name
        return name


def _box(part: Piece, shape: Shape) -> tuple[Shape, Shape]:
    if isinstance(part, Block):
        return part.offsets, part.sizes
    if shape:
        row = math.prod(shape[1:])
        if part.start % row == 0 and part.stop % row == 0:
            tail = shape[1:]
            rows = (part.stop - part.start) // row
            return (part.start // row, *(0 for _ in tail)), (rows, *tail)
    ((offsets, sizes),) = boxes_of_run(part.start, part.stop, shape)
    return offsets, sizes
