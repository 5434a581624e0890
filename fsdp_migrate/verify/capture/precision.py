"""
The script once more, in fp32: there a rounding is 2**-24, and a bug has nowhere to hide.

Precision policies ask for fp32, autocast is off, and a cast to a lower precision goes to fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch.overrides import TorchFunctionMode

LOW = {torch.float16, torch.bfloat16}


def install() -> TorchFunctionMode:
    for policy in (fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy):
        _lift_arguments(policy, "__init__")
    _lift_arguments(torch.nn.Module, "to")
    for name in ("bfloat16", "half"):
        setattr(torch.nn.Module, name, torch.nn.Module.float)
        setattr(torch.Tensor, name, torch.Tensor.float)
    set_default = torch.set_default_dtype
    torch.set_default_dtype = lambda dtype: set_default(lifted(dtype))
    _disable_autocast()
    return Lift()


def lifted(value: Any) -> Any:
    if isinstance(value, torch.dtype) and value in LOW:
        return torch.float32
    return value


def _lift_arguments(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*map(lifted, args), **{key: lifted(v) for key, v in kwargs.items()})

    setattr(owner, name, call)


def _disable_autocast() -> None:
    construct = torch.autocast.__init__

    @functools.wraps(construct)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, device_type, *args, **{**kwargs, "enabled": False})

    torch.autocast.__init__ = init  # type: ignore[method-assign]


class Lift(TorchFunctionMode):
    """Casts and factory functions that name a lower precision."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: lifted(value) for key, value in (kwargs or {}).items()}
        return func(*(lifted(arg) for arg in args), **kwargs)
