"""
Which elements of which parameter this rank holds.

FSDP1, FSDP2, tensor parallelism and plain tensors come out as the same thing: a Piece says which
run of a block of the whole tensor lies in which local tensor. FSDP1's layout is only told by
attributes of its FlatParameter (the same names in torch 2.1 to 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_migrate.verify.capture.fingerprint import CHUNK, fingerprint
from fsdp_migrate.verify.trial import Part


@dataclass(frozen=True)
class Block:
    """Part of a tensor of `shape`: the row-major product of the chosen indices of each dim."""

    shape: tuple[int, ...]
    chosen: tuple[torch.Tensor, ...]  # int64, on CPU

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Block:
        return cls(tuple(shape), tuple(torch.arange(size) for size in shape))

    @classmethod
    def of(cls, spec: Any, coordinate: Sequence[int]) -> Block:
        """The block that a DTensor with this spec keeps at this mesh coordinate."""
        chosen = [torch.arange(size) for size in spec.shape]
        # A strided shard (FSDP over tensor parallelism) cuts what the later mesh dims left.
        plain = [i for i, p in enumerate(spec.placements) if not hasattr(p, "split_factor")]
        strided = [i for i, p in enumerate(spec.placements) if hasattr(p, "split_factor")]
        for dim in plain + strided[::-1]:
            placement = spec.placements[dim]
            if hasattr(placement, "dim"):  # Shard; _StridedShard denies to be one
                rows = torch.chunk(chosen[placement.dim], spec.mesh.size(dim))
                mine = coordinate[dim]
                empty = chosen[placement.dim][:0]
                chosen[placement.dim] = rows[mine] if mine < len(rows) else empty
        return cls(tuple(spec.shape), tuple(chosen))

    @property
    def numel(self) -> int:
        return math.prod(len(rows) for rows in self.chosen)

    def __str__(self) -> str:
        runs = (f"{int(r[0])}..{int(r[-1])}/{len(r)}" if len(r) else "-" for r in self.chosen)
        return "[" + ",".join(runs) + "]"

    def positions(self, start: int, count: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Where elements [start, start + count) of this block lie in the whole tensor."""
        full = all(len(rows) == size for rows, size in zip(self.chosen, self.shape, strict=True))
        for begin in range(start, start + count, CHUNK):
            at = torch.arange(begin, min(begin + CHUNK, start + count), device=device)
            yield at if full else self._unravel(at)

    def _unravel(self, at: torch.Tensor) -> torch.Tensor:
        where = torch.zeros_like(at)
        stride = 1
        for rows, size in zip(self.chosen[::-1], self.shape[::-1], strict=True):
            where += rows.to(at.device)[at % len(rows)] * stride
            at = at // len(rows)
            stride *= size
        return where


@dataclass(frozen=True)
class Piece:
    """This rank's elements of one parameter: `count` of `block` from `start` on."""

    name: str
    carrier: nn.Parameter  # what an optimizer holds
    offset: int | None  # where the run starts in the carrier; None: the carrier is the run
    block: Block
    start: int
    count: int
    kind: str
    layout: str
    degrees: tuple[int, int, int]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    value: Callable[[], torch.Tensor]  # the local run, flat

    @property
    def extent(self) -> str:
        return f"{self.block}:{self.start}+{self.count}"

    def run_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """This piece's run of a tensor shaped as the carrier (a gradient, an optimizer state)."""
        local = local_of(tensor).detach().reshape(-1)
        if self.offset is None:
            return local if local.numel() == self.count else None
        if local.numel() != local_of(self.carrier).numel():
            return None
        return local[self.offset : self.offset + self.count]

    def part(self, run: torch.Tensor) -> Part:
        where = self.block.positions(self.start, self.count, run.device)
        bits, squares, sketch = fingerprint(run, where)
        return Part(self.extent, self.count, bits, squares, tuple(sketch))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def dtensor_piece(name: str, param: DTensor, degrees: tuple[int, int] | None, policy: Any) -> Piece:
    """The piece of a DTensor parameter; `degrees` (shards, replicas) come from its FSDP unit."""
    mesh, spec = param.device_mesh, param._spec
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    block = Block.of(spec, coordinate)
    names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    shards, replicas = degrees or (1, 1)
    return Piece(
        name=name,
        carrier=param,  # type: ignore[arg-type]
        offset=None,
        block=block,
        start=0,
        count=block.numel,
        kind="fsdp2" if degrees else "dtensor",
        layout=f"{tuple(map(str, param.placements))} on mesh {tuple(mesh.shape)}{names}",
        degrees=(shards, replicas, max(1, mesh.size() // (shards * replicas))),
        dtype=param.dtype,
        compute_dtype=getattr(policy, "param_dtype", None) or param.dtype,
        reduce_dtype=_first(policy, "reduce_dtype", "param_dtype") or param.dtype,
        value=lambda: param.to_local().detach().reshape(-1),
    )


def plain_piece(name: str, param: nn.Parameter) -> Piece:
    """The piece of a parameter that nothing shards."""
    return Piece(
        name=name,
        carrier=param,
        offset=None,
        block=Block.all_of(param.shape),
        start=0,
        count=param.numel(),
        kind="plain",
        layout="not sharded",
        degrees=(1, 1, 1),
        dtype=param.dtype,
        compute_dtype=param.dtype,
        reduce_dtype=param.dtype,
        value=lambda: param.detach().reshape(-1),
    )


def fsdp1_pieces(handle: Any, unit: Any, names: list[str]) -> Iterator[Piece]:
    """The pieces of one FSDP1 unit's flat parameter; `names` are those of its parameters."""
    flat = handle.flat_param
    sharded = handle.uses_sharded_strategy
    shards = handle.process_group.size() if sharded else 1
    inter = getattr(unit, "_inter_node_pg", None)
    replicas = (
        inter.size() if inter is not None else (1 if sharded else handle.process_group.size())
    )
    policy = getattr(unit, "mixed_precision", None)
    strategy = getattr(handle._sharding_strategy, "name", "?")
    for i, (name, shape, info) in enumerate(
        zip(names, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        block, tensor_parallel = _fsdp1_block(flat, i, shape)
        where = info.offset_in_shard if info.in_shard else 0
        yield Piece(
            name=name,
            carrier=flat._params[i] if handle._use_orig_params else flat,
            offset=None if handle._use_orig_params else where,
            block=block,
            start=info.intra_param_start_idx if info.in_shard else 0,
            count=info.numel_in_shard if info.in_shard else 0,
            kind="fsdp1",
            layout=f"{strategy} over {shards * replicas} ranks",
            degrees=(shards, replicas, tensor_parallel),
            dtype=flat.dtype,
            compute_dtype=getattr(policy, "param_dtype", None) or flat.dtype,
            reduce_dtype=_first(policy, "reduce_dtype", "param_dtype") or flat.dtype,
            value=_fsdp1_value(handle, where, info.numel_in_shard if info.in_shard else 0),
        )


def _fsdp1_value(handle: Any, offset: int, count: int) -> Callable[[], torch.Tensor]:
    def value() -> torch.Tensor:
        flat = handle.flat_param
        # Until the first forward the flat parameter is still its own local shard.
        local = getattr(flat, "_local_shard", flat)
        run: torch.Tensor = local.detach()[offset : offset + count]
        return run

    return value


def _fsdp1_block(flat: Any, i: int, shape: Sequence[int]) -> tuple[Block, int]:
    """FSDP1 over tensor parallelism flattens the local tensors of DTensors and keeps their spec."""
    spec = flat._param_extensions[i]
    if spec is None or not hasattr(spec, "placements"):
        return Block.all_of(shape), 1
    block = Block.of(spec, spec.mesh.get_coordinate())
    copies = math.prod(
        spec.mesh.size(d) for d, p in enumerate(spec.placements) if isinstance(p, Replicate)
    )
    return block, spec.mesh.size() if copies != spec.mesh.size() else 1


def _first(holder: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(holder, name, None))), None)
