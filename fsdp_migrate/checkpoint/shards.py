"""
What one rank's file holds of a tensor: the records of ShardedTensor and DTensor, made plain.

Layouts of the pickled records: ShardedTensor alike in torch 1.13.1 to 2.15.0; DTensor in three
generations, which differ in how the DeviceMesh is stored (2.1 to 2.6: a mesh tensor; 2.13 and
later: a layout over a rank map).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.pickles import Inert, Stored, TorchDType
from fsdp_migrate.checkpoint.tensors import Piece, Shape, Tensor, piece
from fsdp_migrate.errors import Corrupt, Incomplete, Unsupported


@dataclass(frozen=True, slots=True)
class Shard:
    """The box (offsets, sizes) of a tensor that `stored` is."""

    offsets: Shape
    sizes: Shape
    stored: Stored

    def piece(self, shape: Shape) -> Piece:
        stored = self.stored
        return piece(shape, self.offsets, self.sizes, stored.strides, stored.path, stored.offset)


@dataclass(frozen=True, slots=True)
class RankValue:
    """
    A tensor as one rank's file knows it: its global shape, and the shards that are in this file.

    `peers` are the ranks the record knows to have parts of the checkpoint, `group` the number of
    ranks that share the tensor among them, `rank` the writer's; empty or None where not said.
    """

    kind: str  # "plain", "ShardedTensor" or "DTensor"
    dtype: str
    shape: Shape
    shards: tuple[Shard, ...]
    parameter: bool = False
    rank: int | None = None
    peers: range | tuple[int, ...] = ()
    group: int | None = None

    @property
    def sharded(self) -> bool:
        return self.kind != "plain"


class Meshes:
    """Decodes each DeviceMesh once: all tensors of a file share a few."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._known: dict[int, tuple[Inert, Mesh]] = {}

    def decode(self, mesh: Inert, name: str) -> Mesh:
        known = self._known.get(id(mesh))
        if known is None:
            known = self._known[id(mesh)] = mesh, _mesh(mesh, name, self._gatherer)
        return known[1]


def rank_value(value: Any, name: str, meshes: Meshes) -> RankValue | None:
    """`value` of a pickled tree as a tensor; None if it is none."""
    if isinstance(value, Stored):
        whole = Shard((0,) * len(value.shape), value.shape, value)
        return RankValue("plain", value.dtype, value.shape, (whole,), value.parameter)
    if isinstance(value, Inert):
        if value.qualified.endswith(".sharded_tensor.api.ShardedTensor"):
            return _sharded_tensor(value, name)
        if value.qualified.rpartition(".")[2] == "DTensor":
            return _dtensor(value, name, meshes)
    return None


def _sharded_tensor(value: Inert, name: str) -> RankValue:
    state = value.state
    if not (isinstance(state, tuple) and len(state) == 5):
        raise Corrupt(f"{name}: a ShardedTensor whose state is not torch's five fields")
    local_shards, metadata, group = state[:3]
    dtype = _dtype(metadata.field("tensor_properties").state[0], name)
    shape = tuple(metadata.field("size"))
    shards = []
    for shard in local_shards:
        box, stored = shard.field("metadata"), shard.field("tensor")
        offsets, sizes = tuple(box.field("shard_offsets")), tuple(box.field("shard_sizes"))
        shards.append(_shard(name, dtype, shape, offsets, sizes, stored))
    return RankValue(
        "ShardedTensor",
        dtype,
        shape,
        tuple(shards),
        parameter=True,
        rank=group.field("global_rank"),
        peers=_ranks(group.field("global_world_size")),
        group=group.field("local_world_size"),
    )


@cache
def _ranks(world_size: int) -> range:
    return range(world_size)


def _dtensor(value: Inert, name: str, meshes: Meshes) -> RankValue:
    dtype, shape = _dtype(value.args[1], name), tuple(value.args[2])
    spec, local = value.field("_spec"), value.field("_local_tensor")
    mesh = meshes.decode(spec.field("mesh"), name)
    placements = list(_placements(spec, len(shape)))
    offsets, sizes = _local_box(spec, placements, mesh, shape, name)
    shard = _shard(name, dtype, shape, offsets, sizes, local)
    replicas = _replicas(placements, mesh)
    return RankValue(
        "DTensor",
        dtype,
        shape,
        (shard,),
        parameter=True,
        rank=mesh.rank,
        peers=mesh.peers,
        group=math.prod(mesh.shape) // replicas,
    )


def _shard(name: str, dtype: str, shape: Shape, offsets: Shape, sizes: Shape, stored: Any) -> Shard:
    if not isinstance(stored, Stored):
        raise Corrupt(f"{name}: its shard is not a tensor")
    fits = len(shape) == len(offsets) == len(sizes) and all(
        o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True)
    )
    empty = 0 in sizes and 0 in stored.shape
    if stored.dtype != dtype or not (stored.shape == sizes or empty) or not fits:
        raise Incomplete(
            f"{name}: {stored.path.name} holds {stored.dtype} {list(stored.shape)} where a shard "
            f"of {dtype} {list(sizes)} at {list(offsets)} of {list(shape)} belongs"
        )
    return Shard(offsets, sizes, stored)


def _dtype(value: Any, name: str) -> str:
    if not isinstance(value, TorchDType):
        raise Corrupt(f"{name}: its dtype is not one of torch's")
    return value.name


# DTensor: mesh and placements


@dataclass(frozen=True, slots=True)
class Mesh:
    """The writer's place in its DeviceMesh: `coordinate` has one entry a mesh dimension."""

    shape: Shape
    coordinate: Shape
    rank: int
    peers: tuple[int, ...]
    names: tuple[str, ...] | None


def _mesh(mesh: Inert, name: str, gatherer: Gatherer) -> Mesh:
    state = mesh.state
    if not isinstance(state, dict):
        raise Corrupt(f"{name}: its DeviceMesh has no state")
    names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
    coordinate = state.get("_coordinate_on_dim")
    if "mesh" in state:
        shape, ranks = state["mesh"].shape, _integers(state["mesh"], gatherer)
        rank, peers = None, ranks
    else:
        layout = mesh.field("_layout")
        shape, strides = _axes(layout, name)
        peers = _integers(mesh.field("_rank_map"), gatherer)
        rank = state.get("_rank")
        ranks, at = _sub_mesh(shape, strides, peers, rank, name)
        coordinate = coordinate if coordinate is not None else at
    if coordinate is None or len(coordinate) != len(shape):
        raise Incomplete(f"{name}: written by a rank that is not in the tensor's DeviceMesh")
    coordinate = tuple(coordinate)
    position = 0
    for size, index in zip(shape, coordinate, strict=True):
        position = position * size + index
    if position >= len(ranks):
        raise Corrupt(f"{name}: coordinate {coordinate} is outside of its mesh {list(shape)}")
    own = ranks[position]
    if rank is not None and rank != own:
        raise Corrupt(f"{name}: its mesh says rank {own} where the file says {rank}")
    return Mesh(shape, coordinate, own, peers, tuple(names) if names else None)


def _axes(layout: Inert, name: str) -> tuple[Shape, Shape]:
    """
    Sizes and strides (over the rank map) of a mesh layout: of torch 2.10 to 2.12 as two tuples,
    of later ones an axis at a time, in which a side of 1 has neither size nor stride.
    """
    if isinstance(layout.state, dict) and "axes" in layout.state:
        axes = [(axis.field("shape"), axis.field("stride")) for axis in layout.field("axes")]
    else:
        axes = [((size,), (step,)) for size, step in _pairs(layout)]
    shape, strides = [], []
    for sizes, steps in axes:
        if len(sizes) > 1 or not all(isinstance(size, int) for size in sizes):
            raise Unsupported(f"{name}: flattened DeviceMesh dimensions are not supported")
        shape.append(sizes[0] if sizes else 1)
        strides.append(steps[0] if steps else 1)
    return tuple(shape), tuple(strides)


def _pairs(layout: Inert) -> Iterator[tuple[Any, Any]]:
    shape, strides = layout.field("shape"), layout.field("stride")
    if isinstance(shape, int):
        shape, strides = (shape,), (strides,)
    return zip(shape, strides, strict=True)


def _sub_mesh(
    shape: Shape, strides: Shape, rank_map: tuple[int, ...], rank: int | None, name: str
) -> tuple[tuple[int, ...], Shape]:
    """A mesh may be a slice of a larger one: the ranks of the slice that holds `rank`."""
    if rank is None or rank not in rank_map:
        if math.prod(shape) != len(rank_map) or rank is not None:
            raise Incomplete(f"{name}: written by a rank that is not in the tensor's DeviceMesh")
        base, at = 0, (0,) * len(shape)
    else:
        position = rank_map.index(rank)
        at = tuple((position // step) % size for size, step in zip(shape, strides, strict=True))
        base = position - sum(i * step for i, step in zip(at, strides, strict=True))
    places = (
        base + sum(i * step for i, step in zip(index, strides, strict=True))
        for index in product(*map(range, shape))
    )
    return tuple(rank_map[place] for place in places), at


def _integers(stored: Any, gatherer: Gatherer) -> tuple[int, ...]:
    if not isinstance(stored, Stored) or stored.dtype not in ("int32", "int64"):
        raise Corrupt("a DeviceMesh whose ranks are not an integer tensor")
    code = {"int32": "i", "int64": "q"}[stored.dtype]
    whole = piece(
        stored.shape, (0,) * len(stored.shape), stored.shape, stored.strides, stored.path,
        stored.offset,
    )  # fmt: skip
    data = gatherer.read(Tensor("mesh", stored.dtype, stored.shape, (whole,)))
    return struct.unpack(f"<{math.prod(stored.shape)}{code}", data)


@dataclass(frozen=True, slots=True)
class Placement:
    kind: str  # "Shard", "_StridedShard", "Replicate"
    dim: int = 0
    split_factor: int = 1


def _placements(spec: Inert, dims: int) -> Iterator[Placement]:
    for value in spec.field("placements"):
        kind = value.qualified.rpartition(".")[2]
        state = value.state if isinstance(value.state, dict) else {}
        if kind == "Replicate":
            yield Placement(kind)
        elif kind in ("Shard", "_StridedShard"):
            dim = state.get("dim", value.args[0] if value.args else None)
            if type(dim) is not int:
                raise Corrupt(f"a {kind} placement without its dimension")
            factor = state.get("split_factor", 1)
            yield Placement(kind, dim + dims if dim < 0 else dim, factor)
        else:
            raise Unsupported(f"placement {kind} is not supported (its shards are not values)")


def _replicas(placements: list[Placement], mesh: Mesh) -> int:
    sizes = zip(placements, mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.kind == "Replicate")


def _local_box(
    spec: Inert, placements: list[Placement], mesh: Mesh, shape: Shape, name: str
) -> tuple[Shape, Shape]:
    """
    Where the writer's shard lies. `Shard(d)` cuts as torch.chunk does.

    Mesh dimensions cut from left to right, except that a `_StridedShard` (FSDP over tensor
    parallel) cuts after those to its right that shard the same dimension.
    """
    if len(placements) != len(mesh.shape):
        raise Corrupt(f"{name}: {len(placements)} placements on a mesh of {len(mesh.shape)} dims")
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in _order(spec, placements, mesh, name):
        cut = placements[dim].dim
        if cut >= len(shape):
            raise Corrupt(f"{name}: sharded on dimension {cut} of shape {list(shape)}")
        chunk = -(-sizes[cut] // mesh.shape[dim])
        begin = min(chunk * mesh.coordinate[dim], sizes[cut])
        offsets[cut] += begin
        sizes[cut] = min(chunk, sizes[cut] - begin)
    return tuple(offsets), tuple(sizes)


def _order(spec: Inert, placements: list[Placement], mesh: Mesh, name: str) -> list[int]:
    """Mesh dimensions in the order in which they cut."""
    order: list[int] = []
    strided: list[int] = []
    for dim, placement in enumerate(placements):
        if placement.kind == "Shard":
            order.append(dim)
        elif placement.kind == "_StridedShard":
            later = math.prod(
                mesh.shape[other]
                for other in range(dim + 1, len(placements))
                if placements[other].kind == "Shard" and placements[other].dim == placement.dim
            )
            if later != placement.split_factor:
                raise Unsupported(
                    f"{name}: a _StridedShard with split factor {placement.split_factor}, where "
                    f"the mesh dimensions behind it split by {later}"
                )
            strided.append(dim)
    if len(strided) > 1:
        raise Unsupported(f"{name}: more than one _StridedShard is not supported")
    if strided:
        return order + strided
    return _by_shard_order(spec, order)


def _by_shard_order(spec: Inert, order: list[int]) -> list[int]:
    """torch 2.13 and later can say outright in which order mesh dimensions cut a tensor dim."""
    entries = spec.state.get("shard_order") if isinstance(spec.state, dict) else None
    explicit = []
    for entry in entries or ():
        state = entry.state if isinstance(entry, Inert) else None
        if isinstance(state, dict) and "mesh_dims" in state:
            explicit.extend(state["mesh_dims"])
        elif isinstance(entry, Inert) and len(entry.args) == 2:
            explicit.extend(entry.args[1])
    return explicit if sorted(explicit) == sorted(order) else order
