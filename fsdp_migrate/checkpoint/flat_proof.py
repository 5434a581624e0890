"""
Prove how a checkpoint's flat parameters are laid out, or refuse.

Proofs: the number of elements of every unit; padding elements, which must be 42; with
use_orig_params=True, the local pieces under original names: in a rank's own file they are views
into its shard, so where they lie in it is where the parameter lies in the flat parameter.
"""

from __future__ import annotations

from bisect import bisect_right
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
from fsdp_migrate.checkpoint.tensors import Extent, Item, Store, Tensor
from fsdp_migrate.errors import Incomplete, OpenQuestion

_READ = 1 << 20  # padding is read in parts of as many elements


@dataclass(frozen=True, slots=True)
class Proved:
    units: tuple[Unit, ...]
    junk: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Sight:
    """A local piece seen in a flat parameter: elements [start, stop) of the unit `prefix`."""

    prefix: str
    start: int
    stop: int
    store: Store


def prove(
    flats: Mapping[str, Tensor], layout: ModelLayout, evidence: Evidence, read: Read
) -> Proved:
    """Arguments and errors as `flat.unflatten`."""
    _check_flats(flats, layout)
    sights = _sights(flats, evidence.loose)
    shapes = {parameter.name: parameter for parameter in layout}
    _check_names(sights, shapes, layout)
    ignored, doubtful = _ignored(shapes, sights, evidence)
    loose = evidence.loose.keys() & shapes.keys()
    orig = bool(loose - ignored - doubtful) or bool(sights)
    # Doubtful names go with their module: FSDP ignores modules as a whole.
    modules = {shapes[name].module for name in ignored}
    also = frozenset(name for name in doubtful if shapes[name].module in modules)
    choices = [ignored] if orig else [ignored | doubtful]
    if orig and also:
        choices.append(ignored | also)
    owned = [members(layout, list(flats), choice) for choice in choices]
    units, left = [], set(loose)
    for prefix, flat in flats.items():
        candidates = [
            unit
            for choice in owned
            for unit in _layouts(prefix, choice[prefix], flat, evidence, orig)
        ]
        unit = _only_fit(flat, candidates, sights, read)
        if orig:
            _check_listed(unit, evidence, flat)
        units.append(unit)
    covered = frozenset(
        named.name
        for unit in units
        for placement in unit.placements
        for named in (placement.parameter, *placement.aliases)
    )
    _check_rest(layout, covered, left, evidence)
    return Proved(tuple(units), frozenset(left & covered), tuple(_notes(units, layout)))


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


def _sights(
    flats: Mapping[str, Tensor], loose: Mapping[str, Sequence[Tensor]]
) -> dict[str, list[_Sight]]:
    """Local pieces that are views into a flat parameter's shards, by name."""
    shards: dict[Store, list[tuple[int, int, int, str]]] = {}
    for prefix, flat in flats.items():
        for part in flat.between(0, flat.numel):
            if not isinstance(part.store, Item):
                end = part.offset + (part.stop - part.start) * flat.type.bytes
                shards.setdefault(part.store, []).append((part.offset, end, part.start, prefix))
    for places in shards.values():
        places.sort()
    found: dict[str, list[_Sight]] = {}
    for name, tensors in loose.items():
        for tensor in tensors:
            sight = _sight(tensor, shards, flats)
            if sight is not None:
                found.setdefault(name, []).append(sight)
    return found


def _sight(
    tensor: Tensor,
    shards: Mapping[Store, Sequence[tuple[int, int, int, str]]],
    flats: Mapping[str, Tensor],
) -> _Sight | None:
    if len(tensor.pieces) != 1 or not isinstance(tensor.pieces[0], Extent):
        return None
    piece = tensor.pieces[0]
    places = shards.get(piece.store, ())
    at = bisect_right(places, piece.offset, key=lambda place: place[0]) - 1
    if at < 0:
        return None
    offset, end, start, prefix = places[at]
    size = flats[prefix].type.bytes
    if piece.offset >= end:
        return None
    first, rest = divmod(piece.offset - offset, size)
    if rest or tensor.dtype != flats[prefix].dtype or piece.offset + tensor.nbytes > end:
        raise Incomplete(f"{tensor.name}: it lies across the edge of {flats[prefix].name}'s shard")
    return _Sight(prefix, start + first, start + first + tensor.numel, piece.store)


def _check_names(
    sights: Mapping[str, Sequence[_Sight]], shapes: Mapping[str, Parameter], layout: ModelLayout
) -> None:
    for name, seen in sights.items():
        if name not in shapes:
            where = seen[0].prefix
            raise Incomplete(
                f"{name}: a piece of the flat parameter of FSDP unit {where!r}, and "
                f"{layout.origin} has no such parameter"
            )


def _ignored(
    shapes: Mapping[str, Parameter], sights: Mapping[str, Sequence[_Sight]], evidence: Evidence
) -> tuple[frozenset[str], frozenset[str]]:
    """
    The parameters that FSDP ignored, so that they are whole in the file; and the doubtful ones,
    1-D and whole, which may as well be local pieces.
    """
    ignored = set(evidence.ignored)
    doubtful: set[str] = set()
    for name, parameter in shapes.items():
        copies = evidence.loose.get(name)
        if not copies or name in sights or name in ignored:
            continue
        if all(len(copy.shape) == 1 for copy in copies):
            if any(copy.shape != parameter.shape for copy in copies):
                continue  # a local piece
            in_rank_files = not any(_in_dcp(copy) for copy in copies)
            (ignored if in_rank_files and parameter.numel else doubtful).add(name)
        else:
            ignored.add(name)
    for name in ignored:
        for copy in evidence.loose.get(name, ()):
            if name in shapes and copy.shape != shapes[name].shape:
                raise Incomplete(
                    f"{name}: shape {list(copy.shape)} in the checkpoint, "
                    f"{list(shapes[name].shape)} in the model"
                )
    return frozenset(ignored), frozenset(doubtful)


def _in_dcp(tensor: Tensor) -> bool:
    return any(isinstance(piece.store, Item) for piece in tensor.pieces)


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


def _only_fit(
    flat: Tensor,
    candidates: Sequence[Unit],
    sights: Mapping[str, Sequence[_Sight]],
    read: Read,
) -> Unit:
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
        fault = _displaced(unit, sights) or _unpadded(unit, flat, read)
        if not fault:
            fits.append(unit)
    if not fits:
        raise Incomplete(f"{flat.name}: no layout of {sized[0].title} fits: {fault}")
    if len(fits) > 1:
        options = ", ".join(f"{unit.align or 'no'} elements" for unit in fits)
        raise OpenQuestion(
            f"{flat.name}: {len(fits)} layouts of {fits[0].title} fit (alignment {options}; "
            f"{_difference(fits[0], fits[1])}). The checkpoint does not tell which it is: give a "
            "FULL or SHARDED checkpoint of the same model, or rank files instead of a DCP directory"
        )
    return fits[0]


def _difference(one: Unit, other: Unit) -> str:
    for mine, theirs in zip(one.placements, other.placements, strict=False):
        if mine != theirs:
            one_name, other_name = mine.parameter.name, theirs.parameter.name
            return f"{one_name} at {mine.start}, or {other_name} at {theirs.start}"
    return "one has more parameters"


def _displaced(unit: Unit, sights: Mapping[str, Sequence[_Sight]]) -> str:
    """A local piece that does not lie where `unit` says; empty if there is none."""
    for placement in unit.placements:
        names = [named.name for named in (placement.parameter, *placement.aliases)]
        seen = [sight for name in names for sight in sights.get(name, ())]
        for sight in seen:
            inside = placement.start <= sight.start and sight.stop <= placement.stop
            if sight.prefix != unit.prefix or not inside:
                return (
                    f"{names[0]} should take elements {placement.start} to {placement.stop} of "
                    f"it, and a piece of it takes {sight.start} to {sight.stop} of "
                    f"{sight.prefix!r} in {getattr(sight.store, 'name', sight.store)}"
                )
        found = sum(stop - start for start, stop in {(s.start, s.stop) for s in seen})
        if sights and found != placement.parameter.numel:
            return f"{names[0]} has {placement.parameter.numel} elements, its pieces {found}"
    return ""


def _unpadded(unit: Unit, flat: Tensor, read: Read) -> str:
    """A padding element that is not 42; empty if there is none."""
    if not any(True for _ in unit.padding()):
        return ""
    value = padding_value(flat.dtype)
    for start, stop in unit.padding():
        for low in range(start, stop, _READ):
            high = min(low + _READ, stop)
            if read(flat, low, high) != value * (high - low):
                return f"elements {low} to {high} should be alignment padding, and are not 42"
    return ""


def _check_listed(unit: Unit, evidence: Evidence, flat: Tensor) -> None:
    """With use_orig_params=True the file lists every original name."""
    for placement in unit.placements:
        for named in (placement.parameter, *placement.aliases):
            if named.name not in evidence.loose:
                raise Incomplete(
                    f"{named.name}: a parameter of the model that the checkpoint, which lists the "
                    f"original names, does not have in {flat.name}"
                )


def _check_rest(
    layout: ModelLayout, covered: frozenset[str], loose: set[str], evidence: Evidence
) -> None:
    for parameter in layout:
        if parameter.name in covered:
            continue
        if parameter.name not in loose:
            raise Incomplete(
                f"{parameter.name}: a parameter of {layout.origin} that is in no flat parameter "
                "and not in the checkpoint by name"
            )
        for copy in evidence.loose[parameter.name]:
            if copy.shape != parameter.shape:
                raise Incomplete(
                    f"{parameter.name}: shape {list(copy.shape)} in the checkpoint, "
                    f"{list(parameter.shape)} in the model"
                )


def _notes(units: Sequence[Unit], layout: ModelLayout) -> Iterator[str]:
    owner = {
        named.name: unit
        for unit in units
        for placement in unit.placements
        for named in (placement.parameter, *placement.aliases)
    }
    for parameter in layout:
        first = parameter.same_as
        if first in owner and parameter.name in owner:
            one, other = owner[first], owner[parameter.name]
            if one.prefix != other.prefix:
                yield (
                    f"{parameter.name} and {first} are one parameter in the model, and FSDP stored "
                    f"two: in {other.title} and in {one.title}. Both are kept as they are"
                )
