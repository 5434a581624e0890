"""
Put one checkpoint together from what each rank saved.

Shards of a tensor come from all ranks; equal boxes are replicas (HSDP groups, NO_SHARD, buffers)
and are kept once. Whether replicas really are equal is checked when bytes are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.contents import Contents, KeyPath, RankTree, Replica, shown, walk
from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Role
from fsdp_migrate.checkpoint.pickles import decoding
from fsdp_migrate.checkpoint.shards import Meshes, RankValue, Shard, rank_value
from fsdp_migrate.checkpoint.tensors import Tensor, piece
from fsdp_migrate.checkpoint.torch_file import TorchFile
from fsdp_migrate.errors import Incomplete


@dataclass(frozen=True, slots=True)
class RankFile:
    """`rank` is the number in the file's name."""

    rank: int
    file: TorchFile


@dataclass(frozen=True, slots=True)
class _Seen:
    """One rank's value at a path."""

    rank: int
    value: RankValue


class _Ranks:
    """What the rank files hold, taken in one after the other: their trees need not stay."""

    def __init__(self) -> None:
        self.seen: dict[KeyPath, list[_Seen]] = {}
        self.plain: dict[KeyPath, dict[int, Any]] = {}
        self.raw: dict[KeyPath, list[RankTree]] = {}
        self.order: dict[KeyPath, None] = {}
        self.ranks: set[int] = set()

    def add(self, entry: RankFile) -> None:
        self.ranks.add(entry.rank)
        tree = _without_raw(entry.file.tree, (), entry.rank, self.raw)
        tree = {} if tree is None else tree
        with Gatherer() as gatherer:
            meshes = Meshes(gatherer)
            for path, leaf in walk(tree):
                self.order.setdefault(path)
                with decoding(shown(path)):
                    value = rank_value(leaf, shown(path), meshes)
                if value is None:
                    self.plain.setdefault(path, {})[entry.rank] = leaf
                else:
                    self.seen.setdefault(path, []).append(_Seen(entry.rank, value))


def assemble(files: Iterable[RankFile], format_name: str) -> Contents:
    """
    The contents of a complete set of rank files; `Incomplete` where ranks are missing.

    `files` may be read while they are asked for: one at a time is held.
    """
    found, first = _Ranks(), None
    for entry in files:
        file = entry.file
        first = first or (file.path.parent, _module_paths(file.tree), writer_of(file))
        found.add(entry)
        del entry, file  # before the next one is read
    assert first is not None
    folder, module_paths, writer = first
    seen, plain, ranks = found.seen, found.plain, found.ranks
    views = _take_views(seen)
    _check_ranks(seen, ranks, folder)
    values: dict[KeyPath, object] = {}
    roles: dict[KeyPath, Role] = {}
    replicas: list[Replica] = []
    known = any(_is_parameter(items) for items in seen.values())
    for path in found.order:
        if path in seen:
            tensor, others = _join(path, seen[path], ranks)
            values[path] = tensor
            replicas += others
            # Beside known parameters, the rest are buffers or belong to ignored modules.
            other: Role = "buffer" if known else "unknown"
            roles[path] = "parameter" if _is_parameter(seen[path]) else other
        elif path in plain:
            values[path] = plain[path][min(plain[path])]
    groups = {s.value.group for items in seen.values() for s in items if s.value.group}
    return Contents(
        format=format_name,
        values=values,
        roles=roles,
        raw={path: tuple(items) for path, items in found.raw.items()},
        flat_views=views,
        replicas=tuple(replicas),
        differing=frozenset(path for path, items in plain.items() if not _alike(items, ranks)),
        module_paths=module_paths,
        world_size=_world_size(seen, ranks),
        group_size=max(groups) if groups else None,
        writer=writer,
    )


def writer_of(file: TorchFile) -> str:
    """
    What an archive's records tell of the torch that wrote it.

    `byteorder` came with 2.1, `.format_version` after 2.6 (read from files of each version).
    """
    if ".format_version" in file.archive.records:
        return ">2.6"
    return ">=2.1" if "byteorder" in file.archive.records else "<=2.0"


def is_raw_optimizer(tree: Any) -> bool:
    """Whether `tree` is an optimizer's own state_dict(): states by integer id."""
    if not (isinstance(tree, dict) and "state" in tree and "param_groups" in tree):
        return False
    state, groups = tree["state"], tree["param_groups"]
    if isinstance(state, dict) and state:
        return any(type(key) is int for key in state)
    # A rank that owns nothing has no states; its groups still list the ids.
    return isinstance(groups, list) and any(
        type(param) is int for group in groups if isinstance(group, dict)
        for param in group.get("params", ())
    )  # fmt: skip


def _without_raw(
    tree: Any,
    path: KeyPath,
    rank: int,
    raw: dict[KeyPath, list[RankTree]],
) -> Any:
    """`tree` without the raw optimizers in it, which go into `raw`."""
    if is_raw_optimizer(tree):
        raw.setdefault(path, []).append(RankTree(rank, tree))
        return None
    if isinstance(tree, dict) and len(path) < 6:
        kept = {}
        for key, value in tree.items():
            if isinstance(value, dict | list):
                value = _without_raw(value, (*path, key), rank, raw)
                if value is None:
                    continue
            kept[key] = value
        return kept
    if isinstance(tree, list) and any(is_raw_optimizer(item) for item in tree):
        for position, item in enumerate(tree):
            _without_raw(item, (*path, position), rank, raw)
        return None
    return tree


def is_flat_key(path: KeyPath) -> bool:
    """Whether a path names an FSDP1 flat parameter (1.13 spells it without the underscore)."""
    return bool(path) and isinstance(path[-1], str) and path[-1].endswith("flat_param")


def _take_views(seen: dict[KeyPath, list[_Seen]]) -> dict[KeyPath, dict[str, int]]:
    """
    Remove from `seen` the views into flat parameters that LOCAL files hold under original names.

    With use_orig_params=True each rank's file has, beside a flat parameter, every original name as
    the 1-D piece that this rank owns: a view into the flat shard's storage, never a parameter of
    its own. What is wanted of it is where in the flat parameter it lies.
    """
    flats: dict[tuple[Path, str], tuple[KeyPath, Shard]] = {}
    for path, found in seen.items():
        if is_flat_key(path):
            for item in found:
                for shard in item.value.shards:
                    flats[shard.stored.path, shard.stored.storage] = path, shard
    views: dict[KeyPath, dict[str, int]] = {}
    for path in [path for path in seen if flats and not is_flat_key(path)]:
        shards = [shard for item in seen[path] for shard in item.value.shards]
        owners = [flats.get((shard.stored.path, shard.stored.storage)) for shard in shards]
        if not any(owners):
            continue
        del seen[path]
        for shard, owner in zip(shards, owners, strict=True):
            if owner is not None and 0 not in shard.sizes:
                flat, base = owner
                bytes_in = shard.stored.offset - base.stored.offset
                at = base.offsets[0] + bytes_in // DTYPES[base.stored.dtype].bytes
                known = views.setdefault(flat, {})
                known[str(path[-1])] = min(at, known.get(str(path[-1]), at))
    return views


def _check_ranks(seen: Mapping[KeyPath, list[_Seen]], ranks: set[int], folder: Path) -> None:
    """Every rank that the records know must have its file; HSDP needs one whole replica."""
    peers: set[int] = set()
    worlds: dict[int, int] = {}
    group = world = 0
    counted: set[int] = set()  # of all the shards' peers; a file's shards share a few of them
    for path, found in seen.items():
        for item in found:
            value = item.value
            if value.rank is not None and value.rank != item.rank:
                raise Incomplete(
                    f"{folder}: the file named for rank {item.rank} was written by rank "
                    f"{value.rank} (see {shown(path)})"
                )
            if isinstance(value.peers, range):
                worlds.setdefault(len(value.peers), item.rank)
            if id(value.peers) not in counted:
                counted.add(id(value.peers))
                peers.update(value.peers)
            group, world = max(group, value.group or 0), max(world, len(value.peers))
    if len(worlds) > 1:
        sizes = " and ".join(f"{size} (rank {rank})" for size, rank in sorted(worlds.items()))
        raise Incomplete(f"{folder}: files of two jobs are mixed: world sizes {sizes}")
    if peers and ranks - peers:
        extra = sorted(ranks - peers)
        raise Incomplete(
            f"{folder}: {len(peers)} ranks wrote this checkpoint, but there are files for ranks "
            f"{extra} too; move what another job left there away"
        )
    missing = sorted(peers - ranks)
    if missing and not (group < world and len(ranks) >= group):
        raise Incomplete(f"{folder}: the files of ranks {missing} (of {len(peers)}) are missing")


def _join(path: KeyPath, found: list[_Seen], ranks: set[int]) -> tuple[Tensor, list[Replica]]:
    name = shown(path)
    first = found[0].value
    for item in found[1:]:
        value = item.value
        if (value.dtype, value.shape) != (first.dtype, first.shape):
            raise Incomplete(
                f"{name}: {first.dtype} {list(first.shape)} on rank {found[0].rank}, "
                f"{value.dtype} {list(value.shape)} on rank {item.rank}"
            )
        if value.sharded != first.sharded:
            raise Incomplete(
                f"{name}: sharded on some ranks, a plain tensor on others "
                f"(ranks {found[0].rank} and {item.rank})"
            )
    absent = ranks - {item.rank for item in found}
    if absent and not first.sharded:
        raise Incomplete(
            f"{name}: a whole tensor in the file of rank {found[0].rank}, and not in that of rank "
            f"{min(absent)}; these are not the rank files of one checkpoint"
        )
    boxes: dict[tuple[Any, ...], Shard] = {}
    replicas = []
    for item in found:
        for shard in item.value.shards:
            box = (shard.offsets, shard.sizes)
            kept = boxes.setdefault(box, shard)
            if kept is not shard and 0 not in shard.sizes:
                replicas.append(Replica(path, _alone(path, kept), _alone(path, shard)))
    try:
        pieces = tuple(shard.piece(first.shape) for shard in boxes.values())
        return Tensor(name, first.dtype, first.shape, pieces), replicas
    except Incomplete as error:
        here = sorted(item.rank for item in found)
        raise Incomplete(f"{error}. Ranks read: {here} of {sorted(ranks)}") from None


def _alone(path: KeyPath, shard: Shard) -> Tensor:
    """A shard as a tensor of its own."""
    stored = shard.stored
    zeros = (0,) * len(shard.sizes)
    whole = piece(shard.sizes, zeros, shard.sizes, stored.strides, stored.path, stored.offset)
    return Tensor(shown(path), stored.dtype, shard.sizes, (whole,), str(stored.path))


def _is_parameter(found: list[_Seen]) -> bool:
    return found[0].value.sharded or found[0].value.parameter


def _world_size(seen: Mapping[KeyPath, list[_Seen]], ranks: set[int]) -> int:
    worlds = [len(item.value.peers) for found in seen.values() for item in found]
    return max([*worlds, len(ranks)])


def _alike(found: Mapping[int, Any], ranks: set[int]) -> bool:
    """Whether every rank saved the same plain value. Objects that are not torch's never are."""
    values = [found[rank] for rank in sorted(found)]
    try:
        same = all(value == values[0] for value in values[1:])
    except RecursionError:
        return False
    return len(found) == len(ranks) and same


def _module_paths(tree: Any) -> tuple[str, ...]:
    """The keys of the `_metadata` that nn.Module.state_dict() leaves on its OrderedDict."""
    metadata = getattr(tree, "_metadata", None)
    if isinstance(metadata, dict):
        return tuple(str(key) for key in metadata)
    if isinstance(tree, dict):
        for value in tree.values():
            paths = _module_paths(value) if isinstance(value, dict) else ()
            if paths:
                return paths
    return ()
