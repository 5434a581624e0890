"""
Prove how a checkpoint's flat parameters are laid out, or refuse.

Proofs: the number of elements of every unit; padding elements, which must be 42; and where rank
files of use_orig_params=True show at which element each original parameter begins, that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    known = {parameter.name: parameter for parameter in layout}
    pieces, choices = _ignored(known, evidence)
    orig = bool(evidence.views) or bool(pieces)
    owned = [members(layout, list(flats), choice) for choice in choices(orig)]
    units = []
    for prefix, flat in flats.items():
        candidates = [
            unit
            for choice in owned
            for unit in _layouts(prefix, choice[prefix], flat, evidence, orig)
        ]
        units.append(_only_fit(flat, candidates, evidence, read))
    covered = frozenset(name for unit in units for name in unit.names())
    if orig:
        _check_listed(units, evidence)
    _check_rest(layout, covered, evidence)
    junk = covered & evidence.loose.keys()
    return Proved(tuple(units), junk, tuple(_notes(units, layout)))


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


class _Choices:
    """The sets of parameters that FSDP may have ignored, so that they are whole in the file."""

    def __init__(self, certain: set[str], doubtful: set[str], known: Mapping[str, Parameter]):
        self._certain = frozenset(certain)
        self._doubtful = frozenset(doubtful)
        modules = {known[name].module for name in certain if name in known}
        self._beside = frozenset(name for name in doubtful if known[name].module in modules)

    def __call__(self, orig: bool) -> list[frozenset[str]]:
        if not orig:
            return [self._certain | self._doubtful]
        # FSDP ignores whole modules, so what is doubtful may go with what is certain beside it.
        return [self._certain, self._certain | self._beside] if self._beside else [self._certain]


def _ignored(known: Mapping[str, Parameter], evidence: Evidence) -> tuple[set[str], _Choices]:
    """The names that are local pieces, and what may have been ignored."""
    viewed = {name for views in evidence.views.values() for name in views}
    pieces: set[str] = set()
    certain: set[str] = set(evidence.ignored)
    doubtful: set[str] = set()
    for name, parameter in known.items():
        loose = evidence.loose.get(name)
        if loose is None or name in certain or name in viewed:
            continue
        whole = loose.shape == parameter.shape
        in_dcp = any(isinstance(piece.store, Item) for piece in loose.pieces)
        if len(loose.shape) != 1 or (whole and not in_dcp and parameter.numel):
            certain.add(name)
        else:
            (doubtful if whole else pieces).add(name)
    return pieces, _Choices(certain, doubtful, known)


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
        fault = _displaced(unit, evidence.views) or _unpadded(unit, flat, read)
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
