"""
Give an optimizer's own state_dict(), saved by every rank, its parameters' names.

Its keys are integers, its states what one rank owns (`raw_slots`). What the ids are comes from the
model's layout and its FSDP units; every reading that torch could have written is tried against
the sizes on every rank, and exactly one may fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from fsdp_migrate.checkpoint.contents import RankTree, Replica
from fsdp_migrate.checkpoint.flat_layout import (
    ALIGNMENTS,
    ANY_WRITER,
    Read,
    Writer,
    lay_out,
    members,
)
from fsdp_migrate.checkpoint.id_order import assignments
from fsdp_migrate.checkpoint.index import Group, Optimizer
from fsdp_migrate.checkpoint.model_layout import ModelLayout
from fsdp_migrate.checkpoint.names import clean
from fsdp_migrate.checkpoint.raw_slots import Job, ParameterSlot, Slot, UnitSlot, piece_sizes
from fsdp_migrate.checkpoint.raw_state import Numbered, numbered
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.ties import ties
from fsdp_migrate.errors import Incomplete, OpenQuestion, Unsupported


@dataclass(frozen=True, slots=True)
class Known:
    """
    What is known of the model beside the optimizer.

    `layout`: its parameters. `prefixes`: the FSDP units ("" is the root), from the flat keys of
    LOCAL files or from `wrap_prefixes`; None if nothing tells. `ignored`: parameters that FSDP
    ignored. `group_size`: the ranks of a shard group; None if nothing tells. `tensors`: the model's
    own values, where there are any, to find shared parameters by. `names`: each id's name, where
    the caller knows it.
    """

    layout: ModelLayout
    prefixes: Sequence[str] | None = None
    ignored: frozenset[str] = frozenset()
    group_size: int | None = None
    writer: Writer = ANY_WRITER
    tensors: Mapping[str, Tensor] | None = None
    names: Mapping[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """`replicas` are copies on other ranks, step counts too, that are still to be compared."""

    optimizer: Optimizer
    replicas: tuple[Replica, ...]
    notes: tuple[str, ...]


def wrap_prefixes(module_paths: Sequence[str]) -> list[str] | None:
    """
    The FSDP units of a model, from the module names that torch keeps beside its state dict.

    FSDP1 puts a module of its own around each unit. None where there is no such module.
    """
    names = {path: clean(path) for path in module_paths}
    # As `names.cleaned` does with parameters: `module.` goes where everything is below it.
    while any(names.values()) and all(f"{n}.".startswith("module.") for n in names.values() if n):
        names = {path: n.removeprefix("module").removeprefix(".") for path, n in names.items()}
    units = [n for path, n in names.items() if path.split(".")[-1] == "_fsdp_wrapped_module"]
    return list(dict.fromkeys(units)) or None


def name(trees: Sequence[RankTree], known: Known, read: Read) -> Named:
    """
    `trees` are the ranks' optimizers, in rank order; `read` is asked for padding and, where the
    ids do not fit otherwise, for the model's values.

    Raises `OpenQuestion` where several readings fit or a fact is missing, `Incomplete` where none
    fits.
    """
    raw = numbered(trees)
    if known.names is not None:
        raw = replace(raw, names=known.names)
    faults: list[str] = []
    for layout in _layouts(known, read):
        for lenient in (False, True):
            readings = list(_readings(raw, known, layout, lenient, read))
            fits = _fitting(raw, readings, faults)
            if len(fits) > 1:
                raise OpenQuestion(_ambiguous([reading for reading, _ in fits]))
            if fits:
                return _told(*fits[0], layout)
    if known.prefixes is None:
        raise OpenQuestion(
            _nothing_fits(raw, known, faults)
            + ". Nothing tells which modules were FSDP units: keep the model's own rank files "
            "beside the optimizer, or save it by name (FSDP.optim_state_dict)"
        )
    raise Incomplete(_nothing_fits(raw, known, faults))


Assignment: TypeAlias = Mapping[int, Slot]


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to understand the ids: what it takes them to be, and on which ranks."""

    title: str
    job: Job
    slots: Assignment

    def optimizer(self, raw: Numbered) -> Optimizer:
        state: dict[str, dict[str, object]] = {}
        for number in raw.ids:
            held = raw.held[number]
            if held.states:
                state.update(self.slots[number].states(held, self.job))
        groups = []
        for ids, options in zip(raw.groups, raw.options, strict=True):
            names = tuple(n for number in ids for n in self.slots[number].names)
            if "param_names" in options:
                options = {**options, "param_names": list(names)}
            groups.append(Group(names, options))
        return Optimizer(state, tuple(groups))


def _told(reading: _Reading, optimizer: Optimizer, layout: ModelLayout) -> Named:
    listed = {n for group in optimizer.groups for n in group.params}
    without = [p.name for p in layout.distinct() if p.certain and p.name not in listed]
    notes = [f"the optimizer's ids are {reading.title}"]
    if without:
        notes.append(
            f"{len(without)} parameters are not in the optimizer (frozen): "
            f"{', '.join(without[:5])}{', ...' if len(without) > 5 else ''}"
        )
    replicas = sorted(reading.job.replicas, key=lambda replica: replica.other.origin)
    return Named(optimizer, tuple(replicas), tuple(notes))


def _layouts(known: Known, read: Read) -> Iterator[ModelLayout]:
    """The layout as it is; then with the shared parameters that the values show."""
    yield known.layout
    if known.tensors is None:
        return
    plain = {p.name for p in known.layout.distinct()}
    aliases = ties((t for n, t in known.tensors.items() if n in plain), read)
    if aliases:
        yield known.layout.tied(aliases)


def _readings(
    raw: Numbered, known: Known, layout: ModelLayout, lenient: bool, read: Read
) -> Iterator[_Reading]:
    for size in _group_sizes(len(raw.ranks), known.group_size):
        job = Job(raw.ranks[:size], raw.ranks[size:], known.writer, read)
        for title, slots in _slot_lists(layout, known, size, lenient):
            guessing = lenient and known.prefixes is None
            if guessing and job.sole and not any(_is_matrix(raw, job, n) for n in raw.ids):
                continue
            for found in _assigned(raw, slots, job, lenient):
                # Its own list of replicas: another reading's are none of this one's.
                yield _Reading(title, replace(job, replicas=[]), found)


def _is_matrix(raw: Numbered, job: Job, number: int) -> bool:
    """Whether an id's states have two dimensions or more, which no flat parameter's have."""
    return any(len(shape) > 1 for shape in job.look(raw.held[number]).shapes)


def _group_sizes(ranks: int, known: int | None) -> list[int]:
    if known is not None and ranks % known == 0:
        # NO_SHARD says the same group as FULL_SHARD, and shards nothing.
        return sorted({known, 1})
    return [size for size in range(1, ranks + 1) if ranks % size == 0]


def _slot_lists(
    layout: ModelLayout, known: Known, group_size: int, lenient: bool
) -> Iterator[tuple[str, list[Slot]]]:
    """
    Where the units are not known and parameters may be left out, sizes of 1-D tensors prove too
    little, since any may be a flat shard: only what cannot be one is taken for a parameter then.
    """
    ignored = known.ignored | {p.name for p in layout if not p.certain}
    slots = _parameter_slots(layout, known.prefixes, ignored, group_size)
    if lenient and known.prefixes is None:
        yield "parameters", [replace(slot, never_flat=True) for slot in slots]
        return
    yield "parameters", [*slots]
    guesses = [list(known.prefixes)] if known.prefixes is not None else _guessed(layout)
    for prefixes in guesses:
        yield "FSDP units", _unit_slots(layout, prefixes, ignored)


def _parameter_slots(
    layout: ModelLayout, prefixes: Sequence[str] | None, ignored: frozenset[str], group_size: int
) -> list[ParameterSlot]:
    pieces: dict[str, set[tuple[int, ...]]] = {}
    for prefix, owned in members(layout, prefixes or (), ignored).items():
        for align in (0, *ALIGNMENTS):
            for parameter, sizes in piece_sizes(
                lay_out(prefix, owned, align, group_size), group_size
            ):
                pieces.setdefault(parameter, set()).add(sizes)
    return [
        ParameterSlot(p, frozenset(pieces[p.name]) if p.name in pieces else None)
        for p in layout.distinct()
    ]


def _unit_slots(
    layout: ModelLayout, prefixes: Sequence[str], ignored: frozenset[str]
) -> list[Slot]:
    """
    In the order of FSDP's `named_parameters()`: modules in pre-order, in each module first the
    parameters that FSDP left there, then its flat parameter.
    """
    below: dict[str, int] = {}
    for position, parameter in enumerate(layout):
        owner = parameter.module
        below.setdefault("", position)
        while owner:
            below.setdefault(owner, position)
            owner = owner.rpartition(".")[0]
    owned = members(layout, prefixes, ignored)
    flattened = {p.same_as or p.name for ps in owned.values() for p in ps}
    slots: list[tuple[tuple[int, int, int, int], Slot]] = []
    for prefix, parameters in owned.items():
        if parameters:
            unit = lay_out(prefix, parameters, 0, 1)
            slots.append(((below[prefix], _depth(prefix), 1, 0), UnitSlot(unit)))
    for position, parameter in enumerate(layout):
        if parameter.same_as is None and parameter.name not in flattened:
            key = (below[parameter.module], _depth(parameter.module), 0, position)
            slots.append((key, ParameterSlot(parameter)))
    return [slot for _, slot in sorted(slots, key=lambda pair: pair[0])]


def _depth(prefix: str) -> int:
    return len(prefix.split(".")) if prefix else 0


def _guessed(layout: ModelLayout) -> list[list[str]]:
    """
    Ways in which the model may have been wrapped: all modules of one kind (`layers.*`), with and
    without a root unit. FSDP's wrapping policies wrap by class, and modules of a list share one.
    """
    modules: dict[str, None] = {}
    for parameter in layout:
        owner = parameter.module
        while owner:
            modules.setdefault(owner)
            owner = owner.rpartition(".")[0]
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
        if "*" in kind:
            kinds.setdefault(kind, []).append(module)
    return [[""], *(["", *found] for found in kinds.values()), *kinds.values()]


def _assigned(
    raw: Numbered, slots: Sequence[Slot], job: Job, lenient: bool
) -> Iterator[Assignment]:
    group_of = {n: number for number, ids in enumerate(raw.groups) for n in ids}
    grouped = any(slot.groups - {None} for slot in slots)

    def fits(slot: Slot, number: int) -> bool:
        given = raw.names.get(number)
        named_so = given is None or clean(given) == slot.key
        grouped_so = not grouped or group_of[number] in slot.groups
        return named_so and grouped_so and slot.fits(raw.held[number], job)

    def optional(slot: Slot) -> bool:
        if grouped and slot.groups == {None}:
            return True
        if isinstance(slot, UnitSlot):
            return lenient or all(p.parameter.trainable is False for p in slot.unit.placements)
        return lenient or not slot.parameter.certain or slot.parameter.trainable is False

    if set(raw.names) == set(raw.ids):
        yield from _by_name(raw, slots, fits)
    elif raw.ids == list(range(len(raw.ids))):
        if len(raw.ids) <= len(slots):
            yield from assignments(slots, raw.groups, fits, optional)
    else:
        yield from _by_position(raw, slots, fits)


def _by_name(
    raw: Numbered, slots: Sequence[Slot], fits: Callable[[Slot, int], bool]
) -> Iterator[Assignment]:
    by_key = {slot.key: slot for slot in slots}
    found = {number: by_key.get(clean(given)) for number, given in raw.names.items()}
    whole = {number: slot for number, slot in found.items() if slot is not None}
    if len(whole) == len(found) and all(fits(slot, number) for number, slot in whole.items()):
        yield whole


def _by_position(
    raw: Numbered, slots: Sequence[Slot], fits: Callable[[Slot, int], bool]
) -> Iterator[Assignment]:
    """Ids that do not count through the groups: positions in `model.parameters()`."""
    certain = [s for s in slots if isinstance(s, ParameterSlot) and s.parameter.certain]
    if max(raw.ids) < len(certain):
        found: dict[int, Slot] = {number: certain[number] for number in raw.ids}
        if all(fits(slot, number) for number, slot in found.items()):
            yield found


def _fitting(
    raw: Numbered, readings: Sequence[_Reading], faults: list[str]
) -> list[tuple[_Reading, Optimizer]]:
    """The readings that can be carried out, with what they give, where that differs."""
    fits: list[tuple[_Reading, Optimizer]] = []
    for reading in readings:
        try:
            optimizer = reading.optimizer(raw)
        except (Incomplete, Unsupported) as error:
            faults.append(str(error))
            continue
        if len(readings) == 1 or all(_given(optimizer) != _given(other) for _, other in fits):
            fits.append((reading, optimizer))
    return fits


def _given(optimizer: Optimizer) -> object:
    """What an optimizer says, however it was arrived at."""
    states = {
        fqn: {
            key: (v.dtype, v.shape, v.pieces) if isinstance(v, Tensor) else v
            for key, v in entries.items()
        }
        for fqn, entries in optimizer.state.items()
    }
    return states, optimizer.groups


def _ambiguous(fits: Sequence[_Reading]) -> str:
    one, other = fits[:2]
    for number, slot in one.slots.items():
        if number in other.slots and slot.names != other.slots[number].names:
            return (
                f"the optimizer's id {number} may be {_few(slot.names)} or "
                f"{_few(other.slots[number].names)}: the sizes of its states fit both. Say which "
                'parameters were frozen, or in which group (a layout with "trainable" or "group", '
                "or a factory that returns the model and its optimizer), or save the optimizer by "
                "name (FSDP.optim_state_dict)"
            )
    return (
        f"the optimizer's ids may be {one.title} of shard groups of {len(one.job.ranks)} ranks or "
        f"{other.title} of shard groups of {len(other.job.ranks)}; both fit"
    )


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _nothing_fits(raw: Numbered, known: Known, faults: Sequence[str]) -> str:
    units = (
        f"{len(known.prefixes)} FSDP units" if known.prefixes is not None else "unknown FSDP units"
    )
    sizes = []
    for number in raw.ids[:3]:
        shapes = {
            rank: list(value.shape)
            for key, by_rank in raw.held[number].tensors()
            for rank, value in by_rank.items()
            if value.shape
        }
        sizes.append(f"id {number}: {shapes}")
    fault = f" {faults[0]}." if faults else ""
    return (
        f"the optimizer has {len(raw.ids)} ids in {len(raw.groups)} groups on {len(raw.ranks)} "
        f"ranks; {known.layout.origin} has {len(known.layout.distinct())} parameters in {units}. "
        f"The sizes of its states fit in no way.{fault} It begins with {'; '.join(sizes)}"
    )
