"""
The `.metadata` file of a DCP directory, in the form that torch 2.4 to 2.15 all read.

That is the form 2.6 wrote: `TensorProperties` with five fields (2.15 writes six, which nothing
older reads), no `StorageMeta` (every reader makes its own where it is absent). Chunks come by the
million, so their records are rendered from templates over memoized names instead of one by one.
Classes and fields: `.metadata` of torch 2.6.0 and 2.13.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fsdp_migrate.checkpoint.tensors import Shape
from fsdp_migrate.checkpoint.writers.pickling import (
    Call,
    Global,
    Instance,
    Pickler,
    Shared,
    integer,
)

_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA = Global(_MODULE, "Metadata")
_TENSOR = Global(_MODULE, "TensorStorageMetadata")
_BYTES = Global(_MODULE, "BytesStorageMetadata")
_CHUNK = Global(_MODULE, "ChunkStorageMetadata")
_INDEX = Global(_MODULE, "MetadataIndex")
_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Global("torch", "Size")
_BATCH = 1000

Path: TypeAlias = tuple[str | int, ...]


class StoredItem(NamedTuple):
    """An item of a data file: `length` bytes at `offset` of `file`, a name in the directory."""

    file: str
    offset: int
    length: int


class StoredChunk(NamedTuple):
    """A box of a tensor and the item that holds it."""

    offsets: Shape
    sizes: Shape
    item: StoredItem


class StoredTensor(NamedTuple):
    dtype: str
    shape: Shape
    chunks: Sequence[StoredChunk]


Entry: TypeAlias = StoredTensor | StoredItem  # an item alone holds a pickled Python value


def metadata(entries: Mapping[str, Entry], paths: Mapping[str, Path]) -> bytes:
    """`entries` by flat key; `paths[key]` is where the key's value sits in the nested dict."""
    return _Writer().metadata(entries, paths)


class _Writer:
    def __init__(self) -> None:
        self._pickler = Pickler()
        reference = self._pickler.reference
        self._size = reference(_SIZE)
        self._sizes: dict[Shape, bytes] = {}
        self._properties: dict[str, Shared] = {}
        name = {
            key: reference(key)
            for key in ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
        }
        # Percent-formatting templates: opcodes that hold b"%" themselves must double it.
        self._chunk = _template(
            reference(_CHUNK), b")\x81}(", name["offsets"], None, name["sizes"], None, b"ub"
        )
        key = (reference(_INDEX), b")\x81}(", name["fqn"], None, name["offset"], None)
        self._key = _template(*key, name["index"], None, b"ub")
        self._info = _template(
            *(reference(_INFO), b")\x81}(", name["relative_path"], None),
            *(name["offset"], None, name["length"], None, b"ub"),
        )

    def metadata(self, entries: Mapping[str, Entry], paths: Mapping[str, Path]) -> bytes:
        pickler = self._pickler
        pickler.add(_METADATA)
        pickler.raw(b")\x81}(")
        pickler.add("state_dict_metadata")
        self._tensors(entries)
        pickler.add("planner_data")
        pickler.add(dict(paths))
        pickler.add("storage_data")
        self._storage(entries)
        pickler.raw(b"ub")
        return pickler.finish()

    def _tensors(self, entries: Mapping[str, Entry]) -> None:
        pickler = self._pickler
        pickler.raw(b"}")
        for key, entry in entries.items():
            pickler.add(key)
            if isinstance(entry, StoredItem):
                pickler.add(Instance(_BYTES, (), {}))
            else:
                self._tensor(entry)
            pickler.raw(b"s")

    def _tensor(self, entry: StoredTensor) -> None:
        pickler = self._pickler
        pickler.add(_TENSOR)
        pickler.raw(b")\x81}(")
        pickler.add("properties")
        pickler.add(self._tensor_properties(entry.dtype))
        pickler.add("size")
        pickler.raw(self._shape(entry.shape))
        pickler.add("chunks")
        pickler.raw(b"]")
        shape, template = self._shape, self._chunk
        for start in range(0, len(entry.chunks), _BATCH):
            batch = entry.chunks[start : start + _BATCH]
            body = b"".join([template % (shape(c.offsets), shape(c.sizes)) for c in batch])
            pickler.raw(b"(" + body + b"e")
        pickler.raw(b"ub")

    def _storage(self, entries: Mapping[str, Entry]) -> None:
        pickler, reference, shape = self._pickler, self._pickler.reference, self._shape
        pickler.raw(b"}")
        key_template, info_template = self._key, self._info
        for key, entry in entries.items():
            name = reference(key)
            if isinstance(entry, StoredItem):
                info = info_template % self._item(entry)
                pickler.raw(key_template % (name, b"N", b"N") + info + b"s")
                continue
            files = {file: reference(file) for file in {c.item.file for c in entry.chunks}}
            records = []
            for number, (offsets, _, (file, offset, length)) in enumerate(entry.chunks):
                records.append(key_template % (name, shape(offsets), integer(number)))
                records.append(info_template % (files[file], integer(offset), integer(length)))
            for start in range(0, len(records), _BATCH):
                pickler.raw(b"(" + b"".join(records[start : start + _BATCH]) + b"u")

    def _item(self, item: StoredItem) -> tuple[bytes, bytes, bytes]:
        return self._pickler.reference(item.file), integer(item.offset), integer(item.length)

    def _shape(self, shape: Shape) -> bytes:
        """Opcodes that push a torch.Size."""
        known = self._sizes.get(shape)
        if known is None:
            open_, close = (b"(", b"t") if len(shape) > 3 else (b"", _TUPLES[len(shape)])
            known = self._size + open_ + b"".join(map(integer, shape)) + close + b"\x85R"
            self._sizes[shape] = known
        return known

    def _tensor_properties(self, dtype: str) -> Shared:
        if dtype not in self._properties:
            layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
            contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
            state = (Global("torch", dtype), layout, False, contiguous, False)
            properties = Instance(Global(_MODULE, "TensorProperties"), (), state)
            self._properties[dtype] = Shared(properties)
        return self._properties[dtype]


_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


def _template(*pieces: bytes | None) -> bytes:
    """Opcodes with a `%b` for every None."""
    return b"".join(b"%b" if piece is None else piece.replace(b"%", b"%%") for piece in pieces)
