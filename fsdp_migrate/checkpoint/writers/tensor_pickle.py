"""
How torch.save spells a tensor: a call of a rebuild function on a storage named by its key.

The device tag is always "cpu", so that a file loads anywhere without `map_location`.
Source: pickles of torch 2.6.0 and 2.13.0; `_rebuild_tensor_v3` serves the dtypes that have no
typed storage class (8-bit floats, unsigned ints).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Optimizer, StateValue
from fsdp_migrate.checkpoint.tensors import Shape, Tensor, row_major
from fsdp_migrate.checkpoint.writers.pickling import Call, Global, Persistent
from fsdp_migrate.checkpoint.writers.torch_archive import Payload, Run

SIZE = Global("torch", "Size")
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")


def tensor_call(dtype: str, shape: Shape, key: str) -> Call:
    """A contiguous tensor that fills storage `key`."""
    kind = DTYPES[dtype]
    numel = 1
    for size in shape:
        numel *= size
    where = (0, shape, row_major(shape), False, OrderedDict[object, object]())
    if kind.storage is not None:
        storage = Persistent(("storage", Global("torch", kind.storage), key, "cpu", numel))
        return Call(_REBUILD_V2, (storage, *where))
    untyped = Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", untyped, key, "cpu", numel * kind.bytes))
    return Call(_REBUILD_V3, (storage, *where, Global("torch", dtype)))


def size_call(shape: Shape) -> Call:
    return Call(SIZE, (shape,))


class Storages:
    """The storages of one file, in order; each `add` gives the tensor that stands for it."""

    def __init__(self) -> None:
        self.payloads: list[Payload] = []

    def add(self, run: Run, shape: Shape) -> Call:
        """`run` as a tensor of `shape`, on a storage of its own."""
        self.payloads.append(run if run.nbytes else b"")
        return tensor_call(run.dtype, shape, str(len(self.payloads) - 1))

    def whole(self, tensor: Tensor, dtype: str | None = None) -> Call:
        return self.add(Run(tensor, 0, tensor.numel, dtype or tensor.dtype), tensor.shape)

    def literal(self, dtype: str, shape: Shape, data: bytes) -> Call:
        """A small tensor whose bytes are made here."""
        self.payloads.append(data)
        return tensor_call(dtype, shape, str(len(self.payloads) - 1))

    def step(self, value: float) -> Call:
        """A `step` that was a plain number, as the 0-dim float32 tensor optimizers keep today."""
        return self.literal("float32", (), float32(value))

    def value(self, value: StateValue) -> object:
        """Any state or option with every tensor in it replaced by its pickled form."""
        if isinstance(value, Tensor):
            return self.whole(value)
        if isinstance(value, Mapping):
            return {key: self.value(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            items: Any = value
            return type(items)(self.value(item) for item in items)
        return value


def float32(value: float) -> bytes:
    return struct.pack("<f", value)


def is_plain_step(name: str, value: StateValue) -> bool:
    """Whether a state entry is a step count kept as a Python number (torch before 1.12)."""
    return name == "step" and type(value) in (int, float)


def plain_step_note(optimizer: Optimizer) -> tuple[str, ...]:
    count = sum(
        is_plain_step(name, value)
        for entries in optimizer.state.values()
        for name, value in entries.items()
    )
    if not count:
        return ()
    return (f"{count} step counts were Python numbers; written as 0-dim float32 tensors",)
