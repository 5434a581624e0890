"""
Change the floating dtype of a buffer of elements, as torch does: round to nearest even.
"""

from __future__ import annotations

from fsdp_migrate.errors import UsageError

CASTS = ("float32", "bfloat16", "float16")


def cast_into(data: memoryview, source: str, target: str) -> memoryview:
    """`data` holds elements of dtype `source`; returns them as `target`."""
    import torch  # only here: a conversion that keeps dtypes starts without it

    if target not in CASTS:
        raise UsageError(f"cannot cast to {target}; choose one of {', '.join(CASTS)}")
    tensor = torch.frombuffer(data, dtype=getattr(torch, source)).to(getattr(torch, target))
    result: memoryview = tensor.view(torch.uint8).numpy().data
    return result.cast("B")
