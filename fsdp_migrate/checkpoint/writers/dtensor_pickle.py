"""
How torch.save spells a DTensor: its local tensor, its placements, and the DeviceMesh it lives on.

The mesh's attributes are pickled as they are, and they changed twice:

    2.6 to 2.9     `mesh`: a tensor of ranks
    2.10 to 2.12   `_layout`: shape and stride over `_rank_map`
    2.13 and on    `_layout`: one such layout for each axis

Each is loadable by its own generation only; an attribute that a later torch of the generation
expects is in all of its files. Names of process groups are those that a job gets whose
mesh is the first thing it makes, as in torch's own files.
Sources: files of 2.6.0, 2.13.0 and 2.15.0; torch/distributed/device_mesh.py of 2.6 to 2.15.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from fsdp_migrate.checkpoint.tensors import Shape, row_major
from fsdp_migrate.checkpoint.writers.installed import release
from fsdp_migrate.checkpoint.writers.pickling import Call, Global, Instance, Shared
from fsdp_migrate.checkpoint.writers.tensor_pickle import Storages, size_call
from fsdp_migrate.errors import UsageError

Generation: TypeAlias = Literal["2.6", "2.10", "2.13"]

_TENSOR = "torch.distributed.tensor"
_DTENSOR = Global(_TENSOR, "DTensor")
_SPEC = Global(f"{_TENSOR}._dtensor_spec", "DTensorSpec")
_META = Global(f"{_TENSOR}._dtensor_spec", "TensorMeta")
_ORDER = Global(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry")
_SHARD = Global(f"{_TENSOR}.placement_types", "Shard")
_REPLICATE = Global(f"{_TENSOR}.placement_types", "Replicate")
_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_LAYOUT = Global("torch.distributed._mesh_layout", "_MeshLayout")
_AXIS = Global("torch.distributed._mesh_layout", "_FlatLayout")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_LAYOUT_OF_TENSOR = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CPU = Call(Global("torch", "device"), ("cpu",))


def generation(version: str) -> Generation:
    """The form that torch `version` reads; `UsageError` for one before 2.6."""
    number = release(version)
    if number < (2, 6):
        raise UsageError(f"--target-torch {version}: DTensor files are written for 2.6 and later")
    if number < (2, 10):
        return "2.6"
    return "2.10" if number < (2, 13) else "2.13"


@dataclass(frozen=True, slots=True)
class Mesh:
    """
    The DeviceMesh of one rank: `shape` is (shards,) or, for HSDP, (replicas, shards); ranks are
    numbered row by row. Parameters are cut over the last dimension.
    """

    shape: Shape
    names: tuple[str, ...]
    device_type: str
    rank: int

    @property
    def coordinate(self) -> Shape:
        shards = self.shape[-1]
        inner = self.rank % shards
        return (inner,) if len(self.shape) == 1 else (self.rank // shards, inner)

    def groups(self, form: Generation) -> list[tuple[str, list[int]]]:
        """
        This rank's process group along each dimension: its name and its ranks.

        A dimension of all ranks is the default group "0" (up to 2.9 only that of a 1-D mesh); for
        others a job makes all groups in turn and counts them from 1.
        """
        world, made, groups = prod(self.shape), 1, []
        for dim, size in enumerate(self.shape):
            stride = prod(self.shape[dim + 1 :])
            number = self.rank // (size * stride) * stride + self.rank % stride
            first = self.rank - self.coordinate[dim] * stride
            members = [first + stride * step for step in range(size)]
            if size == world and (form != "2.6" or len(self.shape) == 1):
                groups.append(("0", members))
                continue
            groups.append((str(made + number), members))
            made += world // size
        return groups


class DTensors:
    """The DTensors of one rank's file; they share the one mesh in it."""

    def __init__(self, mesh: Mesh, form: Generation, storages: Storages) -> None:
        self._form = form
        self._mesh = Shared(_mesh(mesh, form, storages))
        shard = Instance(_SHARD, (), {"dim": 0})
        # Up to 2.9 placements were dataclasses, of which Replicate has no field to restore.
        replicate = Instance(_REPLICATE, (), None if form == "2.6" else {})
        self._placements = Shared((shard,) if len(mesh.shape) == 1 else (replicate, shard))
        self._order = Shared((Instance(_ORDER, (0, (len(mesh.shape) - 1,))),))
        self._alike: dict[tuple[str, Shape], tuple[Shared, Shared]] = {}

    def dtensor(self, local: Call, dtype: str, shape: Shape) -> Call:
        """A tensor of global `shape`, cut along dim 0, of which this rank holds `local`."""
        known = self._alike.get((dtype, shape))
        if known is None:
            known = self._alike[dtype, shape] = self._new(dtype, shape)
        args, spec = known
        state = (None, {"_local_tensor": local, "_spec": spec})
        return Call(_FROM_TYPE, (_WRAPPER, _DTENSOR, args, state))

    def _new(self, dtype: str, shape: Shape) -> tuple[Shared, Shared]:
        """
        Constructor arguments and DTensorSpec, of one dtype and shape. DTensors may share a spec:
        torch takes those of results from a cache.
        """
        strides = row_major(shape)
        kind = Global("torch", dtype)
        spec: dict[str, object] = {
            "mesh": self._mesh,
            "placements": self._placements,
            "tensor_meta": Instance(_META, (size_call(shape), strides, kind)),
        }
        if self._form != "2.6":
            spec |= {"shard_order": self._order, "use_strided_shard_as_shard_order": False}
        spec["_hash"] = None  # made when it is first asked for
        args = (_DTENSOR, kind, shape, strides, 0, _LAYOUT_OF_TENSOR, _CPU, False)
        return Shared(args), Shared(Instance(_SPEC, (), spec))


def _mesh(mesh: Mesh, form: Generation, storages: Storages) -> Instance:
    world = prod(mesh.shape)
    ranks = struct.pack(f"<{world}i", *range(world))
    flat = tuple(range(world))
    names = mesh.names or None
    groups = mesh.groups(form)
    if form == "2.6":
        state: dict[str, object] = {
            "device_type": mesh.device_type,
            "mesh": storages.literal("int32", mesh.shape, ranks),
            "mesh_dim_names": names,
            "_flatten_mesh_list": flat,
            "_thread_id": None,
            "_dim_group_infos": [(f"ptd:{name}", members, name) for name, members in groups],
            "_dim_group_names": [name for name, _ in groups],  # what 2.8 and 2.9 look at instead
            "_coordinate_on_dim": list(mesh.coordinate),
        }
    else:
        state = {
            "_device_type": mesh.device_type,
            "_layout": _layout(mesh.shape, form),
            "_rank_map": storages.literal("int32", (world,), ranks),
            "_mesh_dim_names": names,
            "_root_mesh": None,
            "_preserve_rank_order": False,  # compared since 2.15; of no concern to older ones
            "_flatten_rank_map": flat,
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": [name for name, _ in groups],
            "_rank": mesh.rank,
            "_coordinate_on_dim": mesh.coordinate,
        }
    return Instance(_MESH, (), state | {"_hash": None})


def _layout(shape: Shape, form: Generation) -> Instance:
    strides = row_major(shape)
    if form == "2.10":
        return Instance(_LAYOUT, (), {"shape": shape, "stride": strides})
    axes = tuple(
        # A side of 1 is an empty layout, or the meshes would not be equal.
        Instance(_AXIS, (), {"shape": (size,) * (size > 1), "stride": (stride,) * (size > 1)})
        for size, stride in zip(shape, strides, strict=True)
    )
    return Instance(_LAYOUT, (), {"axes": axes})
