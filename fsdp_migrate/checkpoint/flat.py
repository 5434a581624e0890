"""
Un-flatten FSDP1's flat parameters: whole 1-D tensors in, the model's parameters out, no byte moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_migrate.checkpoint.flat_layout import Evidence, Read, Unit, cut
from fsdp_migrate.checkpoint.flat_proof import prove
from fsdp_migrate.checkpoint.model_layout import ModelLayout
from fsdp_migrate.checkpoint.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Unflattened:
    """
    `tensors`: every parameter that was flattened, in model order, shared ones under each name.

    `units` is the proved layout. `junk`: the loose names that are local pieces and must be dropped.
    """

    tensors: Mapping[str, Tensor]
    units: tuple[Unit, ...]
    junk: frozenset[str]
    notes: tuple[str, ...]


FLAT_KEYS = ("_flat_param", "flat_param")  # torch 1.13 spells it without the underscore


def flats_of(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The flat parameters of a model by unit prefix, the root unit's being ""."""
    split = {name: name.rpartition(".") for name in model}
    return {prefix: model[name] for name, (prefix, _, key) in split.items() if key in FLAT_KEYS}


def unflatten(
    flats: Mapping[str, Tensor], layout: ModelLayout, evidence: Evidence, read: Read
) -> Unflattened:
    """
    `flats`: the whole 1-D flat parameter of each unit, by the unit's prefix ("" is the root).

    `read` is asked for padding elements only. Raises `Incomplete` where file and model contradict
    each other, `OpenQuestion` where they leave a choice.
    """
    proved = prove(flats, layout, evidence, read)
    tensors: dict[str, Tensor] = {}
    for unit in proved.units:
        flat = flats[unit.prefix]
        for placement in unit.placements:
            pieces = cut(flat, placement, evidence.writer)
            origin = f"{flat.origin}[{placement.start}:{placement.stop}]"
            for named in (placement.parameter, *placement.aliases):
                tensors[named.name] = Tensor(named.name, flat.dtype, named.shape, pieces, origin)
    ordered = {p.name: tensors[p.name] for p in layout if p.name in tensors}
    return Unflattened(ordered, proved.units, proved.junk, proved.notes)
