"""
Shared parameters that a checkpoint stores twice, found by their values.

FSDP writes a tied parameter under each of its names, as copies; nothing marks them. Parameters of
one shape that are equal bit for bit, and are not one repeated value, are taken to be one. Norms of
ones or biases of zeros are equal by chance, so constants say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_migrate.checkpoint.flat_layout import Read
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.model_layout import ModelLayout, from_index
from fsdp_migrate.checkpoint.tensors import Tensor

_SAMPLE = 1024  # elements that are compared first
_BLOCK = 1 << 20


def ties(tensors: Iterable[Tensor], read: Read) -> dict[str, str]:
    """Later names with the first name that holds the same values; reads whole only what may be."""
    alike: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel > 1:
            alike.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    found: dict[str, str] = {}
    for group in alike.values():
        if len(group) == 1:
            continue
        firsts: dict[bytes, list[Tensor]] = {}
        for tensor in group:
            start = read(tensor, 0, min(_SAMPLE, tensor.numel))
            known = firsts.setdefault(start, [])
            same = next((first for first in known if _equal(first, tensor, read)), None)
            if same is None:
                known.append(tensor)
            elif not _constant(tensor, read):
                found[tensor.name] = same.name
    return found


def layout_with_ties(index: Index, origin: str, read: Read) -> ModelLayout:
    """`from_index`, with the shared parameters that only the values show."""
    layout = from_index(index, origin)
    single = [index.model[parameter.name] for parameter in layout.distinct()]
    return layout.tied(ties(single, read))


def _equal(one: Tensor, other: Tensor, read: Read) -> bool:
    if one.pieces == other.pieces:
        return True
    for start in range(0, one.numel, _BLOCK):
        stop = min(start + _BLOCK, one.numel)
        if read(one, start, stop) != read(other, start, stop):
            return False
    return True


def _constant(tensor: Tensor, read: Read) -> bool:
    first = read(tensor, 0, 1)
    for start in range(0, tensor.numel, _BLOCK):
        stop = min(start + _BLOCK, tensor.numel)
        if read(tensor, start, stop) != first * (stop - start):
            return False
    return True
