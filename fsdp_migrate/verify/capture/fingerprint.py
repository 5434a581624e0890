"""
A tensor reduced to numbers that do not depend on how it is sharded.

FSDP1 cuts a flat parameter anywhere, FSDP2 cuts rows, so bytes of shards cannot be compared. Sums
over elements can: a hash of (position in the whole tensor, bits) summed modulo 2**64 is equal for
two tensors exactly when every element is (up to a collision), whoever holds which element. No
rank has to gather anything, so the comparison works at any model size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

SIGNS = 32  # random-sign sums kept of every tensor: estimates ||a - b|| from two runs' sums
CHUNK = 1 << 20

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(
    local: torch.Tensor, positions: Iterator[torch.Tensor]
) -> tuple[int, float, list[float]]:
    """
    Hash, sum of squares and sketch of the 1-D `local`.

    `positions` yields, chunk by chunk of CHUNK elements, where each element lies in the whole
    tensor's row-major order.
    """
    bits, squares = 0, 0.0
    sketch = [0.0] * SIGNS
    for start, where in zip(range(0, local.numel(), CHUNK), positions, strict=True):
        values = local[start : start + CHUNK]
        mixed = _mix(where)
        bits += int(_mix(mixed + as_integers(values)).sum())
        exact = values.to(torch.float64)
        squares += float(exact.square().sum())
        for sign in range(SIGNS):
            signs = ((mixed >> sign) & 1) * 2 - 1
            sketch[sign] += float((exact * signs).sum())
    return bits % 2**64, squares, sketch


def whole(tensor: torch.Tensor) -> str:
    """A hash of all of a plain tensor, shape and dtype included."""
    flat = tensor.detach().contiguous().view(-1)
    bits = 0
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK]
        where = torch.arange(start, start + values.numel(), device=flat.device)
        bits += int(_mix(_mix(where) + as_integers(values)).sum())
    return f"{tuple(tensor.shape)} {tensor.dtype} {bits % 2**64:016x}"


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """The bits of each element as int64."""
    if values.is_complex():
        pair = torch.view_as_real(values.resolve_conj())
        return as_integers(pair[..., 0]) * _MIX_1 + as_integers(pair[..., 1])
    if values.dtype == torch.bool:
        return values.to(torch.int64)
    return values.view(_BITS[values.element_size()]).to(torch.int64)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser; int64 wraps, and the shifts are made logical by their masks."""
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)
