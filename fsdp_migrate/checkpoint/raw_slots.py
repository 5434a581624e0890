"""
What an optimizer id can stand for, whether its states look like it, and its states by name then.

FSDP1 with use_orig_params=False optimizes flat parameters: every rank holds a shard of the same
size, padded on the right with zeros. With True it optimizes the original parameters, of which every
rank holds the 1-D piece in its shard, and no state at all where it has none. Ignored parameters,
NO_SHARD and optimizers saved whole have whole tensors; FSDP2 has DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from fsdp_migrate.checkpoint.contents import Replica
from fsdp_migrate.checkpoint.flat_layout import Placement, Read, Unit, Writer, cut
from fsdp_migrate.checkpoint.model_layout import Parameter
from fsdp_migrate.checkpoint.raw_state import Held, whole
from fsdp_migrate.checkpoint.shards import RankValue, Shard
from fsdp_migrate.checkpoint.tensors import Extent, Piece, Shape, Tensor
from fsdp_migrate.errors import Incomplete, Unsupported

States: TypeAlias = dict[str, dict[str, object]]  # FQN -> state name -> Tensor or plain value

# Averages of gradients have the parameter's own shape. Those of padding elements, which never have
# a gradient, are zero.
_ALIKE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


@dataclass(frozen=True, slots=True)
class Look:
    """
    What one id looks like: `shapes` of its tensors on any rank; `alike`, by state, if each state
    has one shape on every rank; `sizes`, one a rank of the group, if it is in 1-D pieces.
    """

    plain: bool
    shapes: frozenset[Shape]
    alike: Mapping[str, Shape] | None
    sizes: tuple[int, ...] | None


@dataclass(frozen=True)
class Job:
    """`ranks` of one shard group, in shard order, `others` their replicas; where to read."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    writer: Writer
    read: Read
    replicas: list[Replica] = field(default_factory=list)
    looks: dict[int, Look] = field(default_factory=dict)

    def twin(self, rank: int) -> int:
        """The rank of the first shard group that holds what `rank` of another one holds."""
        return self.ranks[(self.others.index(rank)) % len(self.ranks)]

    @property
    def sole(self) -> bool:
        """Whether there is but one rank: one file, mostly of an optimizer saved whole."""
        return len(self.ranks) + len(self.others) == 1

    def look(self, held: Held) -> Look:
        """Taken once an id: it is compared with many slots."""
        if held.number not in self.looks:
            self.looks[held.number] = self._look(dict(held.tensors()))
        return self.looks[held.number]

    def _look(self, tensors: Mapping[str, Mapping[int, RankValue]]) -> Look:
        everywhere = {*self.ranks, *self.others}
        values = [value for by_rank in tensors.values() for value in by_rank.values()]
        alike: dict[str, Shape] | None = {}
        for key, by_rank in tensors.items():
            shapes = {value.shape for value in by_rank.values()}
            if alike is not None and len(shapes) == 1 and set(by_rank) == everywhere:
                alike[key] = shapes.pop()
            else:
                alike = None
        return Look(
            all(not value.sharded for value in values),
            frozenset(value.shape for value in values),
            alike,
            self._sizes(list(tensors.values())),
        )

    def _sizes(self, tensors: Sequence[Mapping[int, RankValue]]) -> tuple[int, ...] | None:
        sizes = []
        for rank in self.ranks:
            shapes = {by[rank].shape for by in tensors if rank in by} - {()}
            if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
                return None
            sizes.append(next(iter(shapes))[0] if shapes else 0)
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class UnitSlot:
    """A flat parameter."""

    unit: Unit

    @property
    def key(self) -> str:
        return f"{self.unit.prefix}._flat_param".lstrip(".")

    @property
    def names(self) -> list[str]:
        return [placement.parameter.name for placement in self.unit.placements]

    @property
    def groups(self) -> set[int | None]:
        """The param groups it may be in; None: in no known one."""
        return {placement.parameter.group for placement in self.unit.placements}

    def fits(self, held: Held, job: Job) -> bool:
        shard = -(-self.unit.numel // len(job.ranks))
        look = job.look(held)
        shapes = look.shapes - {()}
        return look.plain and (not shapes or (shard,) in shapes <= {(shard,), (1,)})

    def states(self, held: Held, job: Job) -> States:
        shard = -(-self.unit.numel // len(job.ranks))
        found: States = {name: {} for name in self.names}
        for key, by_rank in held.states.items():
            where = f"{self.unit.title}: optimizer state {key}"
            _check_on_all(where, by_rank, job)
            if not _is_shard(by_rank, (shard,)):
                value = _scalar(where, by_rank, job)
                for name in found:
                    found[name][key] = (
                        replace(value, name=f"{name}.{key}") if isinstance(value, Tensor) else value
                    )
                continue
            flat = self._flat(where, key, by_rank, job)
            for placement in self.unit.placements:
                parameter = placement.parameter
                pieces = cut(flat, placement, job.writer)
                name = f"{parameter.name}.{key}"
                found[parameter.name][key] = Tensor(
                    name, flat.dtype, parameter.shape, pieces, where
                )
        return found

    def _flat(self, where: str, key: str, by_rank: Mapping[int, RankValue], job: Job) -> Tensor:
        """The whole flat state without its padding, which is checked."""
        padded = _joined(where, [by_rank[rank] for rank in job.ranks])
        for rank in job.others:
            _replica(where, by_rank[job.twin(rank)], by_rank[rank], job)
        numel = self.unit.numel
        if numel < padded.numel and key in _ALIKE:
            tail = job.read(padded, numel, padded.numel)
            if any(tail):
                raise Incomplete(
                    f"{where}: elements {numel} to {padded.numel} should be padding, and are not "
                    "zero. The units or the model are not the ones that were saved"
                )
        pieces = tuple(e for e in padded.between(0, numel))
        return Tensor(where, padded.dtype, (numel,), pieces)


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """
    An original parameter. `pieces` are the sizes that its parts may have on the ranks of the group;
    None where the FSDP units are not known. `never_flat`: only what cannot be a shard of a flat
    parameter is taken for it.
    """

    parameter: Parameter
    pieces: frozenset[tuple[int, ...]] | None = None
    never_flat: bool = False

    @property
    def key(self) -> str:
        return self.parameter.name

    @property
    def names(self) -> list[str]:
        return [self.parameter.name]

    @property
    def groups(self) -> set[int | None]:
        return {self.parameter.group}

    def fits(self, held: Held, job: Job) -> bool:
        look = job.look(held)
        if not look.shapes or (look.shapes == {()} and self.parameter.shape):
            return True  # no state, or nothing but step counts
        if self.never_flat and look.plain and len(self.parameter.shape) < 2 and not job.sole:
            return False
        return self._whole(look) or (self._in_pieces(look) and not self.never_flat)

    def _whole(self, look: Look) -> bool:
        """Every rank has all of it, as itself or as a DTensor; or factored (Adafactor)."""
        shape, shapes = self.parameter.shape, look.alike
        if shapes is None:
            return False
        if shape in shapes.values():
            return all(
                other == shape or (key not in _ALIKE and math.prod(other) <= self.parameter.numel)
                for key, other in shapes.items()
            )
        if len(shape) < 2:
            return False
        rows = {shape[:-1], (*shape[:-1], 1)}
        columns = {(*shape[:-2], shape[-1]), (*shape[:-2], 1, shape[-1])}
        return any("row" in key and other in rows for key, other in shapes.items()) and any(
            "col" in key and other in columns for key, other in shapes.items()
        )

    def _in_pieces(self, look: Look) -> bool:
        if look.sizes is None or not look.plain or sum(look.sizes) != self.parameter.numel:
            return False
        return self.pieces is None or look.sizes in self.pieces

    def states(self, held: Held, job: Job) -> States:
        look = job.look(held)
        is_whole = self._whole(look)
        found: dict[str, object] = {}
        for key, by_rank in held.states.items():
            name = f"{self.parameter.name}.{key}"
            if is_whole or not look.shapes:
                _check_on_all(name, by_rank, job)
                found[key] = _scalar(name, by_rank, job)
            elif any(_is_tensor(v) and v.shape != () for v in by_rank.values()):
                found[key] = self._concatenated(name, by_rank, job)
            else:
                found[key] = _scalar(name, by_rank, job)
        return {self.parameter.name: found}

    def _concatenated(self, name: str, by_rank: Mapping[int, RankValue], job: Job) -> Tensor:
        flat = _joined(name, [by_rank[rank] for rank in job.ranks if rank in by_rank])
        for rank in job.others:
            if (rank in by_rank) != (job.twin(rank) in by_rank):
                raise Incomplete(f"{name}: ranks {rank} and {job.twin(rank)} should be replicas")
            if rank in by_rank:
                _replica(name, by_rank[job.twin(rank)], by_rank[rank], job)
        if flat.numel != self.parameter.numel:
            raise Unsupported(
                f"{name}: its pieces have {flat.numel} elements, the parameter "
                f"{self.parameter.numel}; only states of the parameter's own size can be put "
                "together"
            )
        pieces = cut(flat, Placement(self.parameter, (), 0), job.writer)
        return Tensor(name, flat.dtype, self.parameter.shape, pieces, flat.origin)


Slot: TypeAlias = UnitSlot | ParameterSlot


def _is_tensor(value: Any) -> bool:
    return isinstance(value, RankValue)


def _is_shard(by_rank: Mapping[int, Any], shape: tuple[int, ...]) -> bool:
    return all(_is_tensor(value) and value.shape == shape for value in by_rank.values())


def _check_on_all(where: str, by_rank: Mapping[int, Any], job: Job) -> None:
    missing = sorted({*job.ranks, *job.others} - set(by_rank))
    if missing:
        raise Incomplete(f"{where} is missing on ranks {missing}")


def _joined(name: str, values: Sequence[RankValue]) -> Tensor:
    """1-D tensors of the ranks, one behind the other."""
    at, pieces = 0, []
    dtypes = {value.dtype for value in values}
    if len(dtypes) != 1:
        raise Incomplete(f"{name}: different dtypes on its ranks: {sorted(dtypes)}")
    for value in values:
        stored = value.shards[0].stored
        if value.sharded or len(stored.shape) != 1 or stored.strides[0] != 1 < stored.shape[0]:
            raise Unsupported(f"{name}: a {value.kind} of shape {list(value.shape)} as a 1-D piece")
        pieces.append(Extent(at, at + stored.shape[0], stored.path, stored.offset))
        at += stored.shape[0]
    return Tensor(name, dtypes.pop(), (at,), tuple(pieces))


def _scalar(name: str, by_rank: Mapping[int, Any], job: Job) -> object:
    """A value that all ranks have alike: a whole tensor, or a plain Python value."""
    ranks = sorted(by_rank, key=lambda rank: (rank in job.others, rank))
    first = by_rank[ranks[0]]
    if not _is_tensor(first):
        for rank in ranks[1:]:
            if _is_tensor(by_rank[rank]) or by_rank[rank] != first:
                raise Incomplete(
                    f"{name} is {first!r:.60} on rank {ranks[0]} and {by_rank[rank]!r:.60} on "
                    f"rank {rank}"
                )
        return first
    boxes: dict[Any, tuple[RankValue, Shard]] = {}
    for rank in ranks:
        value = by_rank[rank]
        if not _is_tensor(value) or (value.dtype, value.shape) != (first.dtype, first.shape):
            raise Incomplete(f"{name}: not the same kind of value on ranks {ranks[0]} and {rank}")
        for shard in value.shards:
            box = shard.offsets, shard.sizes
            kept = boxes.setdefault(box, (value, shard))
            if kept[1] is not shard and 0 not in shard.sizes:
                job.replicas.append(
                    Replica((name,), whole(kept[1].stored, name), whole(shard.stored, name))
                )
    pieces: tuple[Piece, ...] = tuple(s.piece(first.shape) for _, s in boxes.values())
    return Tensor(name, first.dtype, first.shape, pieces)


def _replica(name: str, kept: RankValue, other: RankValue, job: Job) -> None:
    if (kept.dtype, kept.shape) != (other.dtype, other.shape):
        raise Incomplete(f"{name}: its replicas differ in dtype or shape")
    if 0 not in kept.shape:
        one, two = kept.shards[0].stored, other.shards[0].stored
        job.replicas.append(Replica((name,), whole(one, name), whole(two, name)))


def piece_sizes(unit: Unit, world_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """How many elements of each parameter every rank of the group has."""
    shard = max(-(-unit.numel // world_size), 1)
    for placement in unit.placements:
        start, stop = placement.start, placement.stop
        first, last = start // shard, -(-stop // shard)
        inside = [
            min(stop, shard * (rank + 1)) - max(start, shard * rank)
            for rank in range(first, min(last, world_size))
        ]
        before = (0,) * min(first, world_size)
        after = (0,) * (world_size - len(before) - len(inside))
        yield placement.parameter.name, (*before, *inside, *after)
