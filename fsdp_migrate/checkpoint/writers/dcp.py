"""
A directory for torch.distributed.checkpoint: `.metadata` and `.distcp` files of items.

Every item is a torch.save archive of its own: one chunk of a tensor, or one plain value. `--ranks
N` cuts as FSDP2 on N ranks does (`torch.chunk` along dim 0, then one empty chunk where ranks are
left over) and gives each rank its file, so that each reads only its own; without it, chunks and
files are of a size that any number of ranks reads well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.plan import Literal, OutputFile, Part, Plan
from fsdp_migrate.checkpoint.tensors import Shape, Tensor
from fsdp_migrate.checkpoint.writers.dcp_keys import Named, directories, homeless_extras
from fsdp_migrate.checkpoint.writers.dcp_metadata import (
    Entry,
    StoredChunk,
    StoredItem,
    StoredTensor,
    metadata,
)
from fsdp_migrate.checkpoint.writers.group_options import filled
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.checkpoint.writers.parameter_dtype import Decision, decide, is_parameter
from fsdp_migrate.checkpoint.writers.pickling import dumps
from fsdp_migrate.checkpoint.writers.tensor_pickle import (
    float32,
    plain_step_note,
    tensor_call,
)
from fsdp_migrate.checkpoint.writers.torch import extras_note
from fsdp_migrate.checkpoint.writers.torch_archive import Archive, Run, archive

NAME = "dcp"

CHUNK = 64 << 20  # bytes; a rank reads every chunk it needs a part of, whole
FILE = 4 << 30


def plan(index: Index, options: TargetOptions) -> Plan:
    """Lay out the directory, or the two of accelerate."""
    options.only(NAME, "ranks", "mesh", "keys")
    index, notes = with_filled_options(index)
    decision = decide(index, options)
    files: list[OutputFile] = []
    for folder, leaves in directories(index, options.keys).items():
        files += _Directory(index, options, decision).files(folder, leaves)
    return Plan(
        tuple(files),
        notes=(*decision.notes, *notes, *extras_note(homeless_extras(index, options.keys))),
    )


def with_filled_options(index: Index) -> tuple[Index, tuple[str, ...]]:
    """The index with every group option that loading asks for, and what had to be changed."""
    if index.optimizer is None:
        return index, ()
    optimizer, notes = filled(index.optimizer)
    made = Index(index.model, optimizer, index.roles, index.extras, index.notes)
    return made, (*notes, *plain_step_note(optimizer))


@dataclass(slots=True)
class DataFile:
    """A `.distcp` file as it grows."""

    name: str
    size: int = 0
    parts: list[Part] = field(default_factory=list)

    def append(self, layout: Archive, runs: tuple[Run, ...] = ()) -> StoredItem:
        self.parts += layout.parts(runs, self.size)
        item = StoredItem(self.name, self.size, layout.size)
        self.size += layout.size
        return item

    def value(self, value: object) -> StoredItem:
        """A plain Python value as an item."""
        return self.append(archive(dumps(value), ()))

    def step(self, value: float) -> StoredChunk:
        """A plain step count as a 0-dim float32 tensor."""
        layout = archive(dumps(tensor_call("float32", (), "0")), (float32(value),))
        return StoredChunk((), (), self.append(layout))


def empty_chunk(data: DataFile, tensor: Tensor) -> StoredChunk:
    """The one chunk of a tensor without elements."""
    item = data.append(archive(dumps(tensor_call(tensor.dtype, tensor.shape, "0")), (b"",)))
    return StoredChunk(tuple(0 for _ in tensor.shape), tensor.shape, item)


class _Directory:
    def __init__(self, index: Index, options: TargetOptions, decision: Decision) -> None:
        self._index, self._options, self._decision = index, options, decision
        self._data: list[DataFile] = [DataFile(_name(rank)) for rank in range(options.shards or 1)]
        self._layouts: dict[tuple[str, Shape], Archive] = {}

    def files(self, folder: str, leaves: list[Named]) -> Iterator[OutputFile]:
        entries = {leaf.key: self._entry(leaf) for leaf in leaves}
        for data in filter(lambda data: data.size, self._data):
            yield OutputFile(PurePosixPath(folder, data.name), data.size, tuple(data.parts))
        content = metadata(entries, {leaf.key: leaf.path for leaf in leaves})
        path = PurePosixPath(folder, ".metadata")
        yield OutputFile(path, len(content), (Literal(0, content),))

    def _entry(self, leaf: Named) -> Entry:
        value = leaf.value
        if leaf.step:
            return StoredTensor("float32", (), [self._data[0].step(value)])  # type: ignore[arg-type]
        if not isinstance(value, Tensor):
            return self._data[0].value(value)
        dtype = self._decision.dtypes[leaf.model] if leaf.model is not None else value.dtype
        ranks = self._options.shards
        if ranks is None:
            chunks = [self._chunk(value, dtype, *rows) for rows in self._rows_by_size(value, dtype)]
        elif self._is_sharded(leaf, value):
            chunks = [
                self._chunk(value, dtype, start, stop, rank)
                for rank, (start, stop) in enumerate(rows_by_rank(value.shape[0], ranks))
            ]
        else:
            chunks = [self._chunk(value, dtype, 0, _rows(value.shape), 0)]
        return StoredTensor(dtype, value.shape, chunks)

    def _is_sharded(self, leaf: Named, tensor: Tensor) -> bool:
        """Whether FSDP2 shards it: parameters, and optimizer state that is shaped like its own."""
        if not tensor.shape:
            return False
        if leaf.model is not None:
            return is_parameter(self._index, leaf.model)
        owner = self._index.model.get(leaf.of or "")
        return owner is None or owner.shape == tensor.shape

    def _rows_by_size(self, tensor: Tensor, dtype: str) -> Iterator[tuple[int, int]]:
        rows = _rows(tensor.shape)
        row = max(tensor.numel // max(rows, 1) * DTYPES[dtype].bytes, 1)
        step = max(CHUNK // row, 1)
        for start in range(0, max(rows, 1), step):
            if self._data[-1].size >= FILE:
                self._data.append(DataFile(_name(len(self._data))))
            yield start, min(start + step, rows)

    def _chunk(
        self, tensor: Tensor, dtype: str, start: int, stop: int, rank: int = -1
    ) -> StoredChunk:
        """Rows [start, stop) of a tensor, appended to a rank's file (by default the last)."""
        row = math.prod(tensor.shape[1:])
        sizes = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        offsets = (start, *(0 for _ in sizes[1:])) if tensor.shape else ()
        run = Run(tensor, start * row, stop * row, dtype)
        runs = (run,) if run.nbytes else ()
        item = self._data[rank].append(self._layout(dtype, sizes), runs)
        return StoredChunk(offsets, sizes, item)

    def _layout(self, dtype: str, sizes: Shape) -> Archive:
        """The archive of a chunk: the same for all chunks of one dtype and size."""
        known = self._layouts.get((dtype, sizes))
        if known is None:
            nbytes = math.prod(sizes) * DTYPES[dtype].bytes
            known = archive(dumps(tensor_call(dtype, sizes, "0")), (nbytes,))
            self._layouts[dtype, sizes] = known
        return known


def rows_by_rank(rows: int, ranks: int) -> Iterator[tuple[int, int]]:
    """
    Rows [start, stop) of each rank, as torch.chunk deals them: ceil(rows / ranks) each, a shorter
    one, and one empty at the end if ranks are left over (the others would be the same chunk).
    """
    step = max(-(-rows // ranks), 1)
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)
    if rows and -(-rows // step) < ranks:
        yield rows, rows


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _name(rank: int) -> str:
    return f"__{rank}_0.distcp"
