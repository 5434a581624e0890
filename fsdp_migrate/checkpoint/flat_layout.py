"""
FSDP1's flat parameters: where each original parameter lies in them.

An FSDP unit flattens the parameters below its module (those of nested units and ignored ones
excepted) into one 1-D parameter, module by module in pre-order, a shared one once. With
use_orig_params=True, torch 2.1 and later pads in front of each parameter to 16 bytes of the compute
dtype, and at the end to a multiple of the world size; padding elements are 42 and stay 42 (facts:
files of torch 1.13.1 to 2.15.0, `_flat_param.py`). None of this is in a checkpoint. So every layout
that torch could have used is laid over the file, and the one that fits is taken: none, or two that
differ, is an error.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from fsdp_migrate.checkpoint.model_layout import ModelLayout, Parameter
from fsdp_migrate.checkpoint.tensors import (
    Block,
    Extent,
    Piece,
    Shape,
    Tensor,
    boxes_of_run,
    row_major,
)
from fsdp_migrate.errors import OpenQuestion, Unsupported, UsageError

Read: TypeAlias = Callable[[Tensor, int, int], bytes]  # the bytes of elements [start, stop)
Version: TypeAlias = tuple[int, int]

# 16 bytes over the size of float8, bfloat16, float32, float64 and complex128 elements.
ALIGNMENTS = (16, 8, 4, 2, 1)
_PADDING = {
    "float64": struct.pack("<d", 42.0),
    "float32": struct.pack("<f", 42.0),
    "float16": struct.pack("<e", 42.0),
    "bfloat16": struct.pack("<f", 42.0)[2:],
    "complex64": struct.pack("<2f", 42.0, 0.0),
    "complex128": struct.pack("<2d", 42.0, 0.0),
}


@dataclass(frozen=True, slots=True)
class Writer:
    """The torch versions that may have written a checkpoint, as far as it tells."""

    oldest: Version = (1, 13)
    newest: Version = (99, 0)

    @property
    def memory_order(self) -> bool | None:
        """Whether non-contiguous parameters are flattened in memory order; None: not known."""
        if self.oldest >= (2, 6):
            return True
        return False if self.newest <= (2, 5) else None


ANY_WRITER = Writer()

# What containers reveal (see `Contents.writer`). A mark that 2.6 lacks and 2.13 has says nothing
# of the versions in between, so its absence is no upper bound of 2.6.
_WRITERS = {
    "<=2.0": Writer(newest=(2, 0)),
    "<2.4": Writer(newest=(2, 3)),
    ">=2.1": Writer(oldest=(2, 1), newest=(2, 12)),
    ">=2.4": Writer(oldest=(2, 4), newest=(2, 12)),
    ">2.6": Writer(oldest=(2, 7)),
    "": ANY_WRITER,
}


def writer_of(revealed: str, said: str | None = None) -> Writer:
    """
    The range that a container reveals, narrowed to the version ("2.3") that the user says.

    Raises `UsageError` where the two contradict each other.
    """
    known = _WRITERS[revealed]
    if said is None:
        return known
    match = re.fullmatch(r"(\d+)\.(\d+)(\.\w+)?", said)
    if match is None:
        raise UsageError(f"torch version {said!r}: expected one like 2.3 or 2.3.1")
    version = int(match[1]), int(match[2])
    if not known.oldest <= version <= known.newest:
        raise UsageError(
            f"torch version {said}: the checkpoint was written by one between "
            f"{_version(known.oldest)} and {_version(known.newest)}"
        )
    return Writer(version, version)


class Placement(NamedTuple):
    """`parameter` (and its shared `aliases`) begins at element `start` of the flat parameter."""

    parameter: Parameter
    aliases: tuple[Parameter, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel


@dataclass(frozen=True, slots=True)
class Unit:
    """
    The layout of one flat parameter of `numel` elements.

    `align` is in elements; 0 means no padding at all. Elements outside every placement are padding.
    """

    prefix: str
    placements: tuple[Placement, ...]
    numel: int
    align: int = 0

    def padding(self) -> Iterator[tuple[int, int]]:
        """The runs of padding elements."""
        reached = 0
        for placement in self.placements:
            if placement.start > reached:
                yield reached, placement.start
            reached = placement.stop
        if self.numel > reached:
            yield reached, self.numel

    def names(self) -> Iterator[str]:
        """Every original name, shared parameters under each of theirs."""
        for placement in self.placements:
            for named in (placement.parameter, *placement.aliases):
                yield named.name

    def same_places(self, other: Unit) -> bool:
        """Whether every element is the same one's; where nothing lies does not matter."""
        return [p for p in self.placements if p.start < p.stop] == [
            p for p in other.placements if p.start < p.stop
        ]

    @property
    def title(self) -> str:
        return f"FSDP unit {self.prefix!r}" if self.prefix else "the root FSDP unit"


def lay_out(prefix: str, members: Sequence[Parameter], align: int, world_size: int) -> Unit:
    """`members` in FSDP's order, shared parameters under every name they have in the unit."""
    position = 0
    places: dict[str, tuple[Parameter, list[Parameter], int]] = {}
    for member in members:
        identity = member.same_as or member.name
        if identity in places:
            places[identity][1].append(member)
            continue
        if align:
            position += -position % align
        places[identity] = (member, [], position)
        position += member.numel
    if align:
        position += -position % world_size
    placements = tuple(Placement(p, tuple(more), start) for p, more, start in places.values())
    return Unit(prefix, placements, position, align)


def members(
    layout: ModelLayout, prefixes: Sequence[str], ignored: frozenset[str] = frozenset()
) -> dict[str, list[Parameter]]:
    """The parameters of each unit: each belongs to the innermost unit above it."""
    units: dict[str, list[Parameter]] = {prefix: [] for prefix in prefixes}
    for parameter in layout:
        if parameter.name in ignored:
            continue
        owner = parameter.module
        while owner and owner not in units:
            owner = owner.rpartition(".")[0]
        if owner in units:
            units[owner].append(parameter)
    return units


def cut(flat: Tensor, placement: Placement, writer: Writer) -> tuple[Piece, ...]:
    """
    The pieces of one parameter of a 1-D `flat` tensor.

    Raises `OpenQuestion` where the order of a non-contiguous parameter's elements depends on a
    torch version that is not known.
    """
    parameter = placement.parameter
    runs = flat.between(placement.start, placement.stop)
    shifted = (
        Extent(e.start - placement.start, e.stop - placement.start, e.store, e.offset) for e in runs
    )
    order = parameter.memory_order()
    if order is None or writer.memory_order is False:
        return tuple(shifted)
    if writer.memory_order is None:
        raise OpenQuestion(
            f"{parameter.name} is not contiguous in the model (strides "
            f"{list(parameter.strides or ())}). torch 2.6 and later flatten such a parameter in "
            "memory order, earlier ones row-major, and this checkpoint does not tell which torch "
            f"wrote it (between {_version(writer.oldest)} and {_version(writer.newest)}): say which"
        )
    return tuple(_memory_blocks(shifted, parameter.shape, order, flat.type.bytes))


def _memory_blocks(
    runs: Iterable[Extent], shape: Shape, order: Sequence[int], size: int
) -> Iterator[Block]:
    """Runs of a tensor stored with its dimensions in `order`, as boxes of the tensor itself."""
    permuted = tuple(shape[dim] for dim in order)
    memory_strides = row_major(permuted)
    back = [order.index(dim) for dim in range(len(shape))]

    def logical(values: Shape) -> Shape:
        return tuple(values[at] for at in back)

    strides = logical(memory_strides)
    for run in runs:
        for offsets, sizes in boxes_of_run(run.start, run.stop, permuted):
            first = sum(o * s for o, s in zip(offsets, memory_strides, strict=True))
            where = run.offset + (first - run.start) * size
            yield Block(logical(offsets), logical(sizes), run.store, where, strides)


@dataclass(frozen=True, slots=True)
class Evidence:
    """
    What a checkpoint says beside its flat parameters.

    `loose`: every other tensor of the model by FQN. Out of a DCP directory of a model with
    use_orig_params=True, these include one rank's local piece of each original parameter, which is
    no parameter. `views`, known from rank files of such a model: by unit prefix, the element of its
    flat parameter at which each original parameter begins. `world_size` is that of the shard group;
    None: as many as there are shards. `ignored`: what the user says was under ignored modules.
    """

    loose: Mapping[str, Tensor] = field(default_factory=dict)
    views: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    world_size: int | None = None
    writer: Writer = ANY_WRITER
    ignored: frozenset[str] = frozenset()


def padding_value(dtype: str) -> bytes:
    """42 as one element of `dtype`."""
    try:
        return _PADDING[dtype]
    except KeyError:
        raise Unsupported(f"flat parameters of {dtype} with alignment padding") from None


def _version(version: Version) -> str:
    return "today" if version[0] == 99 else f"{version[0]}.{version[1]}"
