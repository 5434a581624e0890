"""
FSDP2's own state dicts, one torch.save file a rank: DTensors cut along dim 0, buffers plain.

File names are verl's. The model file is `model.state_dict()`; the optimizer file is the raw
`optimizer.state_dict()` of an optimizer made over the model's parameters in their order, which
numbers them instead of naming them. `load_state_dict` demands that the model lives on an equal
mesh: same ranks, same names of its dimensions, same device type.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from fsdp_migrate.checkpoint.index import Index, Optimizer, StateValue
from fsdp_migrate.checkpoint.plan import OutputFile, Plan
from fsdp_migrate.checkpoint.tensors import Shape, Tensor
from fsdp_migrate.checkpoint.writers.dtensor_pickle import DTensors, Generation, Mesh, generation
from fsdp_migrate.checkpoint.writers.installed import installed_torch
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.checkpoint.writers.parameter_dtype import Decision, decide, is_parameter
from fsdp_migrate.checkpoint.writers.pickling import Call, dumps
from fsdp_migrate.checkpoint.writers.tensor_pickle import Storages, is_plain_step, plain_step_note
from fsdp_migrate.checkpoint.writers.torch import extras_note
from fsdp_migrate.checkpoint.writers.torch_archive import Run, parts_of
from fsdp_migrate.errors import Unsupported, UsageError

NAME = "fsdp2"

_NAMES = {1: ("fsdp",), 2: ("ddp", "fsdp")}  # verl's


def plan(index: Index, options: TargetOptions) -> Plan:
    """Lay out every rank's files; `UsageError` without a world size."""
    options.only(NAME, "ranks", "mesh", "device_type", "mesh_dim_names")
    world = options.world_size
    if world is None:
        raise UsageError("--to fsdp2 needs --ranks N, or --mesh RxS for HSDP")
    decision = decide(index, options)
    form = generation(options.target_torch or installed_torch().version)
    files: list[OutputFile] = []
    for rank in range(world):
        mesh = mesh_of(options, rank)
        made = {}
        if index.model:
            made["model"] = _Rank(index, decision, mesh, form).model()
        if index.optimizer is not None:
            made["optim"] = _Rank(index, decision, mesh, form).optimizer(index.optimizer)
        for kind, (content, storages) in made.items():
            stem = f"{kind}_world_size_{world}_rank_{rank}"
            parts, size = parts_of(dumps(content), storages.payloads, stem)
            files.append(OutputFile(PurePosixPath(f"{stem}.pt"), size, tuple(parts)))
    notes = (*decision.notes, _mesh_note(mesh_of(options, 0), form), *_optimizer_notes(index))
    return Plan(tuple(files), notes=(*notes, *extras_note(index.extras)))


def mesh_of(options: TargetOptions, rank: int) -> Mesh:
    shape: Shape = options.mesh if options.mesh is not None else (options.ranks or 1,)
    names = _NAMES[len(shape)] if options.mesh_dim_names is None else options.mesh_dim_names
    if names and len(names) != len(shape):
        raise UsageError(f"{len(names)} mesh dimension names for a mesh of {len(shape)} dimensions")
    device = options.device_type or installed_torch().device_type
    return Mesh(shape, names, device, rank)


def rows_of(rows: int, shards: int, number: int) -> tuple[int, int]:
    """Rows [start, stop) of one shard, as torch.chunk deals them; empty past the last chunk."""
    step = -(-rows // shards)
    return min(number * step, rows), min((number + 1) * step, rows)


def numbered(index: Index, optimizer: Optimizer) -> dict[str, int]:
    """
    Parameter ids as a new optimizer with these groups gives them: group by group, each in the
    order of the model's parameters.
    """
    order = {name: number for number, name in enumerate(index.model)}
    ids: dict[str, int] = {}
    for group in optimizer.groups:
        for name in sorted(group.params, key=lambda name: order.get(name, len(order))):
            ids[name] = len(ids)
    return ids


@dataclass(slots=True)
class _Rank:
    """One file of one rank, as it is put together."""

    index: Index
    decision: Decision
    mesh: Mesh
    form: Generation

    def model(self) -> tuple[object, Storages]:
        storages = Storages()
        dtensors = DTensors(self.mesh, self.form, storages)
        locals_: dict[object, Call] = {}
        content: OrderedDict[str, Call] = OrderedDict()
        for name, tensor in self.index.model.items():
            dtype = self.decision.dtypes[name]
            if not self._is_sharded(name):
                content[name] = storages.whole(tensor, dtype)
                continue
            key = (tensor.pieces, tensor.shape, dtype) if tensor.pieces else name
            if key not in locals_:  # tied parameters are views of one local tensor
                locals_[key] = self._local(tensor, dtype, storages)
            content[name] = dtensors.dtensor(locals_[key], dtype, tensor.shape)
        return content, storages

    def optimizer(self, optimizer: Optimizer) -> tuple[object, Storages]:
        storages = Storages()
        dtensors = DTensors(self.mesh, self.form, storages)
        ids = numbered(self.index, optimizer)
        known = [name for name in ids if name in optimizer.state]
        state = {
            ids[name]: self._entries(name, optimizer.state[name], dtensors, storages)
            for name in known
        }
        groups = [
            {key: storages.value(value) for key, value in group.options.items()}
            | {"params": sorted(ids[name] for name in group.params)}
            for group in optimizer.groups
        ]
        return {"state": state, "param_groups": groups}, storages

    def _entries(
        self,
        name: str,
        entries: Mapping[str, StateValue],
        dtensors: DTensors,
        storages: Storages,
    ) -> dict[str, object]:
        shape = self.index.model[name].shape if name in self.index.model else None
        made: dict[str, object] = {}
        for key, value in entries.items():
            if is_plain_step(key, value):
                made[key] = storages.step(value)  # type: ignore[arg-type]
            elif (
                isinstance(value, Tensor)
                and value.shape
                and (shape is None or (value.shape == shape and self._is_sharded(name)))
            ):
                local = self._local(value, value.dtype, storages)
                made[key] = dtensors.dtensor(local, value.dtype, value.shape)
            else:
                made[key] = storages.value(value)
        return made

    def _is_sharded(self, name: str) -> bool:
        # fully_shard takes no 0-dim parameter: one that exists is ignored, a plain tensor.
        return bool(self.index.model[name].shape) and is_parameter(self.index, name)

    def _local(self, tensor: Tensor, dtype: str, storages: Storages) -> Call:
        start, stop = rows_of(tensor.shape[0], self.mesh.shape[-1], self.mesh.coordinate[-1])
        row = math.prod(tensor.shape[1:])
        run = Run(tensor, start * row, stop * row, dtype)
        return storages.add(run, (stop - start, *tensor.shape[1:]))


def _mesh_note(mesh: Mesh, form: Generation) -> str:
    names = f"named {', '.join(mesh.names)}" if mesh.names else "without names"
    shape = "x".join(map(str, mesh.shape))
    reads = {"2.6": "torch 2.6 to 2.9", "2.10": "torch 2.10 to 2.12", "2.13": "torch 2.13 and on"}
    return (
        f"DTensors on a {mesh.device_type} mesh {shape} {names}, as {reads[form]} reads them; "
        "load_state_dict wants the model on an equal mesh (--device-type, --mesh-names)"
    )


def _optimizer_notes(index: Index) -> tuple[str, ...]:
    optimizer = index.optimizer
    if optimizer is None:
        return ()
    grouped = {name for group in optimizer.groups for name in group.params}
    homeless = [name for name in optimizer.state if name not in grouped]
    if homeless:
        raise Unsupported(
            f"the optimizer has state for {homeless[0]}, which is in none of its param groups: "
            "raw optimizer files cannot say so; --to dcp can"
        )
    return plain_step_note(optimizer)
