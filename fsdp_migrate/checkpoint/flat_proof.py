"""
Prove how a checkpoint's flat parameters are laid out, or refuse.

Proofs: the number of elements of every unit; padding elements, which must be 42; and with
use_orig_params=True the local pieces of the original parameters: rank files show at which element
each begins, a DCP directory has one rank's copy, which must equal what lies where it should.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_migrate.checkpoint.flat_layout import (
    ALIGNMENTS,
    Evidence,
    Read,
    Unit,
    lay_out,
    members,
    padding_value,
)
from fsdp_migrate.checkpoint.model_layout import ModelLayout, Parameter
from fsdp_migrate.checkpoint.tensors import Item, Tensor
from fsdp_migrate.errors import Incomplete, OpenQuestion

_READ = 1 << 20  # padding is read in parts of as many elements
_SAMPLE = 1024  # elements compared at each end of a copy


@dataclass(frozen=True, slots=True)
class Proved:
    units: tuple[Unit, ...]
    junk: frozenset[str]
    notes: tuple[str, ...]


def prove(
    flats: Mapping[str, Tensor], layout: ModelLayout, evidence: Evidence, read: Read
) -> Proved:
    """Arguments and errors as `flat.unflatten`."""
    _check_flats(flats, layout)
    _check_views(evidence, layout)
    found: list[Proved] = []
    faults: list[Incomplete] = []
    for hypotheses in _hypotheses(layout, evidence):
        for orig, ignored in hypotheses:
            try:
                proved = _prove(flats, layout, evidence, read, orig, ignored)
            except Incomplete as fault:
                faults.append(fault)
                continue
            if not any(_same(proved, other) for other in found):
                found.append(proved)
        if found:
            break
    else:
        raise faults[0]
    if len(found) > 1:
        raise OpenQuestion(
            "the flat parameters fit the model in more than one way, which differ in the "
            f"parameters that FSDP ignored: {_difference_in(found[0], found[1])}. Say which "
            "modules were in ignored_modules, or use rank files instead of a DCP directory"
        )
    return found[0]


def _prove(
    flats: Mapping[str, Tensor],
    layout: ModelLayout,
    evidence: Evidence,
    read: Read,
    orig: bool,
    ignored: frozenset[str],
) -> Proved:
    owned = members(layout, list(flats), ignored)
    units = []
    for prefix, flat in flats.items():
        candidates = list(_layouts(prefix, owned[prefix], flat, evidence, orig))
        units.append(_only_fit(flat, candidates, evidence, read))
    covered = frozenset(name for unit in units for name in unit.names())
    if orig:
        _check_listed(units, evidence)
    _check_rest(layout, covered, evidence)
    junk = covered & evidence.loose.keys()
    return Proved(tuple(units), junk, tuple(_notes(units, layout)))


def _same(one: Proved, other: Proved) -> bool:
    """Whether they differ in parameters without elements at most."""
    pairs = zip(one.units, other.units, strict=True)
    return all(mine.same_places(its) for mine, its in pairs)


def _difference_in(one: Proved, other: Proved) -> str:
    names = {name for unit in one.units for name in unit.names()}
    others = {name for unit in other.units for name in unit.names()}
    return ", ".join(sorted(names ^ others)[:3])


def _check_flats(flats: Mapping[str, Tensor], layout: ModelLayout) -> None:
    for prefix, flat in flats.items():
        if len(flat.shape) != 1 or not flat.contiguous:
            raise Incomplete(f"{flat.name}: a flat parameter of shape {list(flat.shape)}, not 1-D")
        if prefix and not any(p.name.startswith(f"{prefix}.") for p in layout):
            some = ", ".join(p.name for p in layout.parameters[:3])
            raise Incomplete(
                f"{flat.name}: an FSDP unit {prefix!r}, and {layout.origin} has nothing below "
                f"that name (it begins with {some}). Give the model as it was wrapped"
            )


def _check_views(evidence: Evidence, layout: ModelLayout) -> None:
    known = {parameter.name for parameter in layout}
    for prefix, views in evidence.views.items():
        for name in views:
            if name not in known:
                raise Incomplete(
                    f"{name}: a part of the flat parameter of FSDP unit {prefix!r}, and "
                    f"{layout.origin} has no such parameter"
                )


_Hypothesis: TypeAlias = tuple[bool, frozenset[str]]


def _hypotheses(layout: ModelLayout, evidence: Evidence) -> Iterator[list[_Hypothesis]]:
    """
    Whether use_orig_params was True, with the parameters that FSDP ignored: those whole.

    First the likely ones; only if none of them fits, those that ignore any one more module.
    """
    pieces, ignored, doubtful = _sorted_loose(layout, evidence)
    likely: list[_Hypothesis] = []
    if not (evidence.views or pieces):
        likely.append((False, ignored | doubtful))
    if evidence.views or pieces or doubtful:
        likely.append((True, ignored))
    uncertain = frozenset(p.name for p in layout if p.name in doubtful and not p.certain)
    if uncertain:
        likely.append((True, ignored | uncertain))
    # FSDP ignores whole modules, so what is doubtful may go with what is certain beside it.
    modules = {p.module for p in layout if p.name in ignored}
    beside = frozenset(p.name for p in layout if p.name in doubtful and p.module in modules)
    if beside - uncertain:
        likely.append((True, ignored | uncertain | beside))
    yield likely
    owners = dict.fromkeys(p.module for p in layout if p.name in doubtful)
    yield [
        (
            True,
            ignored
            | uncertain
            | beside
            | {n for n in doubtful if n.startswith(f"{owner}.") or not owner},
        )
        for owner in owners
    ]


def _sorted_loose(
    layout: ModelLayout, evidence: Evidence
) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of local pieces, of ignored parameters, and of what could be either: whole and 1-D."""
    viewed = {name for views in evidence.views.values() for name in views}
    pieces: set[str] = set()
    ignored: set[str] = set(evidence.ignored)
    doubtful: set[str] = set()
    for parameter in layout:
        name, loose = parameter.name, evidence.loose.get(parameter.name)
        if loose is None or name in ignored or name in viewed:
            continue
        whole = loose.shape == parameter.shape
        in_dcp = any(isinstance(piece.store, Item) for piece in loose.pieces)
        if len(loose.shape) != 1 or (whole and not in_dcp and parameter.numel):
            ignored.add(name)
        else:
            (doubtful if whole else pieces).add(name)
    return frozenset(pieces), frozenset(ignored), frozenset(doubtful)


def _layouts(
    prefix: str, owned: Sequence[Parameter], flat: Tensor, evidence: Evidence, orig: bool
) -> Iterator[Unit]:
    """Every layout that torch could have used."""
    world_size = evidence.world_size or len(flat.pieces) or 1
    if not orig or evidence.writer.oldest < (2, 1):
        yield lay_out(prefix, owned, 0, world_size)
    if orig and evidence.writer.newest >= (2, 1):
        for align in ALIGNMENTS:
            yield lay_out(prefix, owned, align, world_size)


def _only_fit(flat: Tensor, candidates: Sequence[Unit], evidence: Evidence, read: Read) -> Unit:
    sized = [unit for unit in candidates if unit.numel == flat.numel]
    if not sized:
        sizes = sorted({unit.numel for unit in candidates})
        raise Incomplete(
            f"{flat.name} has {flat.numel} elements; the model's parameters of "
            f"{candidates[0].title} take {' or '.join(map(str, sizes))}. The model is not the one "
            "that was saved (sizes, number of layers, tied or ignored parameters)"
        )
    fits: list[Unit] = []
    fault = ""
    for unit in sized:
        if any(unit.same_places(other) for other in fits):
            continue
        fault = (
            _displaced(unit, evidence.views)
            or _unpadded(unit, flat, read)
            or _foreign_piece(unit, flat, evidence.loose, read)
        )
        if not fault:
            fits.append(unit)
    if not fits:
        raise Incomplete(f"{flat.name}: no layout of {sized[0].title} fits: {fault}")
    if len(fits) > 1:
        options = " or ".join(f"{unit.align or 'no'} elements" for unit in fits)
        raise OpenQuestion(
            f"{flat.name}: {len(fits)} layouts of {fits[0].title} fit (alignment of {options}; "
            f"{_difference(fits[0], fits[1])}). This checkpoint does not tell which it is: use the "
            "rank files instead of a DCP directory, or a FULL or SHARDED checkpoint"
        )
    return fits[0]


def _difference(one: Unit, other: Unit) -> str:
    for mine, theirs in zip(one.placements, other.placements, strict=False):
        if mine != theirs:
            one_name, other_name = mine.parameter.name, theirs.parameter.name
            return f"{one_name} at {mine.start}, or {other_name} at {theirs.start}"
    return "one has more parameters"


def _displaced(unit: Unit, views: Mapping[str, Mapping[str, int]]) -> str:
    """A parameter that begins elsewhere than `unit` says; empty if there is none."""
    if not views:
        return ""
    starts = dict(views.get(unit.prefix, {}))
    for placement in unit.placements:
        names = [named.name for named in (placement.parameter, *placement.aliases)]
        seen = {starts.pop(name) for name in names if name in starts}
        if placement.parameter.numel and seen != {placement.start}:
            found = " and ".join(map(str, sorted(seen))) or "nowhere"
            return f"{names[0]} should begin at element {placement.start}, and begins at {found}"
    extra = next(iter(starts), None)
    return f"{extra} is in it, and does not belong to it" if extra is not None else ""


def _unpadded(unit: Unit, flat: Tensor, read: Read) -> str:
    """A padding element that is not 42; empty if there is none."""
    for start, stop in unit.padding():
        value = padding_value(flat.dtype)
        for low in range(start, stop, _READ):
            high = min(low + _READ, stop)
            if read(flat, low, high) != value * (high - low):
                return f"elements {low} to {high} should be alignment padding, and are not 42"
    return ""


def _foreign_piece(unit: Unit, flat: Tensor, loose: Mapping[str, Tensor], read: Read) -> str:
    """A rank's copy of a parameter that is not what `unit` has there; empty if there is none."""
    for placement in unit.placements:
        for named in (placement.parameter, *placement.aliases):
            copy = loose.get(named.name)
            if copy is None or copy.numel == 0:
                continue
            runs = [
                (run.start, run.stop)
                for run in flat.between(placement.start, placement.stop)
                if run.stop - run.start == copy.numel
            ]
            if copy.dtype != flat.dtype or not any(
                _alike(copy, flat, start, read) for start, _ in runs
            ):
                return (
                    f"the checkpoint also has {copy.numel} elements of {named.name}, and they are "
                    f"not what lies at {placement.start} to {placement.stop}"
                )
    return ""


def _alike(copy: Tensor, flat: Tensor, start: int, read: Read) -> bool:
    """Whether the first and the last elements of `copy` are those of `flat` from `start` on."""
    count = min(copy.numel, _SAMPLE)
    last = copy.numel - count
    return read(copy, 0, count) == read(flat, start, start + count) and read(
        copy, last, copy.numel
    ) == read(flat, start + last, start + copy.numel)


def _check_listed(units: Sequence[Unit], evidence: Evidence) -> None:
    """With use_orig_params=True the checkpoint lists every original name."""
    listed = {name for views in evidence.views.values() for name in views} | evidence.loose.keys()
    for unit in units:
        for placement in unit.placements:
            for named in (placement.parameter, *placement.aliases):
                if named.numel and named.name not in listed:
                    raise Incomplete(
                        f"{named.name}: a parameter of the model in {unit.title}, and the "
                        "checkpoint, which lists the original names, does not have it"
                    )


def _check_rest(layout: ModelLayout, covered: frozenset[str], evidence: Evidence) -> None:
    for parameter in layout:
        if parameter.name in covered:
            continue
        loose = evidence.loose.get(parameter.name)
        if loose is None:
            raise Incomplete(
                f"{parameter.name}: a parameter of {layout.origin} that is in no flat parameter "
                "and not in the checkpoint by name"
            )
        if loose.shape != parameter.shape:
            raise Incomplete(
                f"{parameter.name}: shape {list(loose.shape)} in the checkpoint, "
                f"{list(parameter.shape)} in {layout.origin}"
            )


def _notes(units: Sequence[Unit], layout: ModelLayout) -> Iterator[str]:
    owner = {name: unit for unit in units for name in unit.names()}
    for parameter in layout:
        first = parameter.same_as
        if first in owner and parameter.name in owner:
            one, other = owner[first], owner[parameter.name]
            if one.prefix != other.prefix:
                yield (
                    f"{parameter.name} and {first} are one parameter in the model, and FSDP stored "
                    f"two: in {other.title} and in {one.title}. Both are kept as they are"
                )
