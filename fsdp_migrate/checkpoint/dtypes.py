"""
The element types of torch, and what each container calls them.

Names follow torch without its prefix ("bfloat16"). safetensors' names are those of its format
description; storage classes are the legacy typed storages that torch.save writes. A dtype without
one is written on an UntypedStorage and rebuilt by `torch._utils._rebuild_tensor_v3` (seen in files
of 2.13.0).
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_migrate.errors import Unsupported


@dataclass(frozen=True, slots=True)
class DType:
    """`bytes` is the size of one element as torch counts elements (float4 packs two in one)."""

    name: str
    bytes: int
    floating: bool
    safetensors: str | None
    storage: str | None


_ALL = (
    DType("float64", 8, True, "F64", "DoubleStorage"),
    DType("float32", 4, True, "F32", "FloatStorage"),
    DType("float16", 2, True, "F16", "HalfStorage"),
    DType("bfloat16", 2, True, "BF16", "BFloat16Storage"),
    DType("int64", 8, False, "I64", "LongStorage"),
    DType("int32", 4, False, "I32", "IntStorage"),
    DType("int16", 2, False, "I16", "ShortStorage"),
    DType("int8", 1, False, "I8", "CharStorage"),
    DType("uint8", 1, False, "U8", "ByteStorage"),
    DType("uint16", 2, False, "U16", None),
    DType("uint32", 4, False, "U32", None),
    DType("uint64", 8, False, "U64", None),
    DType("bool", 1, False, "BOOL", "BoolStorage"),
    DType("complex32", 4, False, None, None),
    DType("complex64", 8, False, "C64", "ComplexFloatStorage"),
    DType("complex128", 16, False, None, "ComplexDoubleStorage"),
    DType("float8_e4m3fn", 1, True, "F8_E4M3", None),
    DType("float8_e5m2", 1, True, "F8_E5M2", None),
    DType("float8_e4m3fnuz", 1, True, "F8_E4M3FNUZ", None),
    DType("float8_e5m2fnuz", 1, True, "F8_E5M2FNUZ", None),
    DType("float8_e8m0fnu", 1, True, "F8_E8M0", None),
    DType("float4_e2m1fn_x2", 1, True, None, None),
)

DTYPES = {dtype.name: dtype for dtype in _ALL}
FROM_SAFETENSORS = {dtype.safetensors: dtype for dtype in _ALL if dtype.safetensors}
FROM_STORAGE = {dtype.storage: dtype for dtype in _ALL if dtype.storage}


def dtype(name: str) -> DType:
    """The dtype torch calls `name`; `Unsupported` for any other (qint8)."""
    try:
        return DTYPES[name]
    except KeyError:
        raise Unsupported(f"dtype torch.{name} is not supported") from None
