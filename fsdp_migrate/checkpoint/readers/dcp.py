"""
A distributed checkpoint (DCP): `.metadata` beside `*.distcp` files.

`.metadata` is one pickle that names every chunk of every tensor with its item's place; the items
are opened only when bytes are wanted. Layouts of torch 1.13.1 to 2.15.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.contents import Contents, KeyPath
from fsdp_migrate.checkpoint.dtypes import dtype as known_dtype
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Role
from fsdp_migrate.checkpoint.pickles import Inert, TorchDType, Unpickler, decoding
from fsdp_migrate.checkpoint.tensors import Extent, Item, Piece, Shape, Tensor, piece, row_major
from fsdp_migrate.checkpoint.torch_file import read_item
from fsdp_migrate.errors import Corrupt, Incomplete, SourceError, Unsupported

METADATA = ".metadata"


def read(folder: Path) -> Contents:
    metadata = _load(folder)
    with decoding(folder / METADATA):
        return _contents(folder, metadata)


def _contents(folder: Path, metadata: Inert) -> Contents:
    stored = metadata.field("state_dict_metadata")
    paths = metadata.state.get("planner_data") or {}
    items = _items(folder, metadata.field("storage_data"))
    values: dict[KeyPath, object] = {}
    roles: dict[KeyPath, Role] = {}
    with Gatherer() as gatherer:
        # The metadata lists chunks by rank and size; the planner's map has the state dict's order.
        for key in dict.fromkeys((*(key for key in paths if key in stored), *stored)):
            entry = stored[key]
            # torch flattens all keys or none, and a key is its path with dots.
            path = tuple(paths.get(key, ()) if paths else (key,))
            if ".".join(map(str, path)) != key:
                raise Corrupt(f"{folder / METADATA}: key {key!r} has the path {path}: damaged")
            kind = entry.qualified.rpartition(".")[2]
            if kind == "TensorStorageMetadata":
                values[path] = _tensor(key, entry, items.get(key, {}))
                if len(entry.field("chunks")) > 1:
                    # Only what is sharded has chunks, empty ones included; buffers are whole.
                    roles[path] = "parameter"
            elif kind == "BytesStorageMetadata":
                values[path] = _value(key, items.get(key, {}), gatherer, folder)
            else:
                raise Unsupported(f"{folder}: {key} is stored as {kind}, which is not known")
    return Contents(format="DCP", values=values, roles=roles, writer=_writer(metadata))


def _load(folder: Path) -> Inert:
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Incomplete(
            f"{folder}: has .distcp files but no {METADATA}, which DCP writes last: the save was "
            "cut off, and without it nothing says which bytes belong to which tensor"
        ) from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    metadata = Unpickler(data, path).load()
    if not (isinstance(metadata, Inert) and metadata.qualified.endswith("metadata.Metadata")):
        raise Corrupt(f"{path}: not the metadata of a distributed checkpoint")
    if not isinstance(metadata.state, dict):
        raise Corrupt(f"{path}: has no fields")
    return metadata


def _items(folder: Path, storage: Any) -> Mapping[str, dict[Shape | None, Item]]:
    """Each key's items by chunk offset (None for a bytes item)."""
    if not isinstance(storage, dict):
        raise Corrupt(f"{folder / METADATA}: its storage data is not a dict")
    sizes: dict[str, int] = {}
    files: dict[str, Path] = {}
    items: dict[str, dict[Shape | None, Item]] = defaultdict(dict)
    for index, info in storage.items():
        at, where = index.__dict__, info.__dict__
        name, key = where["relative_path"], at["fqn"]
        if name not in files:
            files[name], sizes[name] = _file(folder, name)
        if where.get("transform_descriptors"):
            raise Unsupported(
                f"{folder}: {key} is stored through {where['transform_descriptors']}; "
                "compressed items are not supported"
            )
        offset, length = where["offset"], where["length"]
        if sizes[name] >= 0 and offset + length > sizes[name]:
            raise Incomplete(
                f"{files[name]}: has {sizes[name]} bytes, but {key} is at byte {offset} to "
                f"{offset + length}: truncated"
            )
        place = at.get("offset")
        known = items[key]
        if place in known:
            raise Incomplete(f"{folder}: {key} has two items at {place}")
        known[place] = Item(files[name], offset, length, key)
    return items


def _file(folder: Path, name: Any) -> tuple[Path, int]:
    """The file a relative path names, which must lie inside the checkpoint, and its size."""
    if (
        not isinstance(name, str)
        or not name
        or Path(name).is_absolute()
        or ".." in Path(name).parts
    ):
        raise Corrupt(f"{folder / METADATA}: refers to {name!r}, outside of the checkpoint")
    path = folder / name
    try:
        return path, path.stat().st_size
    except FileNotFoundError:
        raise Incomplete(f"{folder}: {name} is missing, which {METADATA} refers to") from None
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None


def _tensor(key: str, entry: Inert, items: Mapping[Shape | None, Item]) -> Tensor:
    properties, size = entry.field("properties"), tuple(entry.field("size"))
    state = properties.state
    first = state[0] if isinstance(state, tuple) else properties.field("dtype")
    if not isinstance(first, TorchDType):
        raise Corrupt(f"{key}: its dtype is not one of torch's")
    name = known_dtype(first.name).name
    pieces: list[Piece] = []
    strides = row_major(size)
    for chunk in entry.field("chunks"):
        box = chunk.__dict__
        offsets, sizes = tuple(box["offsets"]), tuple(box["sizes"])
        if 0 in sizes:
            continue
        item = items.get(offsets)
        if item is None and len(items) == 1 and None in items:
            item = items[None]
        if item is None:
            raise Incomplete(f"{key}: the metadata lists a chunk at {list(offsets)} without data")
        if size and sizes[1:] == size[1:] and not any(offsets[1:]):
            # Whole rows, as nearly all of what may be millions of chunks: known to be one run.
            start = offsets[0] * strides[0]
            pieces.append(Extent(start, start + sizes[0] * strides[0], item, 0))
        else:
            pieces.append(piece(size, offsets, sizes, row_major(sizes), item, 0))
    return Tensor(key, name, size, tuple(pieces))


def _value(
    key: str, items: Mapping[Shape | None, Item], gatherer: Gatherer, folder: Path
) -> object:
    """A bytes item's Python value."""
    if len(items) != 1:
        raise Incomplete(f"{folder}: {key} has {len(items)} items, expected one")
    item = next(iter(items.values()))
    tree = read_item(item, gatherer.file(item.path)).tree
    _refuse_lost_shards(key, tree, folder)
    return tree


def _refuse_lost_shards(key: str, tree: Any, folder: Path) -> None:
    """
    torch 1.13 pickled a nested state dict as one item of rank 0, ShardedTensors and all.

    The other ranks' shards were never written, so nothing can bring them back.
    """
    if isinstance(tree, dict):
        for value in tree.values():
            _refuse_lost_shards(key, value, folder)
    elif isinstance(tree, Inert) and tree.qualified.endswith("ShardedTensor"):
        raise Incomplete(
            f"{folder}: {key} was saved by torch 1.13 as one object of rank 0; it holds rank 0's "
            "shards only, those of the other ranks were never written. Not recoverable"
        )


def _writer(metadata: Inert) -> str:
    if "version" in metadata.state:
        return ">2.6"
    return ">=2.4" if "storage_meta" in metadata.state else "<2.4"
