from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.devices import cpu_mesh, kind
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import string_value
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import Argument, Translation

_CURRENT = "torch.cuda.current_device"
_TWO_DIMENSIONS = ("HYBRID", "NO_SHARD")


class DeviceArgument(ArgumentRule):
    """
    `device_id=` goes: FSDP2 uses the current device of the mesh.

    Where nothing in the run calls `torch.cuda.set_device`, that call is put before the sharding.
    For the CPU a mesh says so, since FSDP2 would take a machine's GPUs.
    """

    name = "device-id"
    arguments = ("device_id",)
    examples = (
        Example(
            before="""
                import torch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, device_id=local_rank)
            """,
            after="""
                import torch
                from torch.distributed.fsdp import fully_shard

                torch.cuda.set_device(local_rank)
                fully_shard(model)
            """,
        ),
        Example(
            before="""
                import torch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, device_id=torch.cuda.current_device())
            """,
            after="""
                import torch
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file, at = argument.value, into.file, into.at
        plain = file.values.only(value)
        current = isinstance(plain, cst.Call) and plain.args and string_value(plain.args[0].value)
        if is_none(value) or current == "cuda" or file.is_call(plain, _CURRENT):
            return "rewritten", "dropped: FSDP2 uses the current device"
        known = kind(file, value)
        if known == "cpu":
            if not self._has_mesh(into, file):
                into.mesh = lambda: cpu_mesh(file, at)
            return "rewritten", "a mesh of CPU ranks"
        if file.sets_device or file.project.sets_device:
            return "rewritten", "dropped: the run sets the current device itself"
        if file.device_is_set(at, file.tree.code(value)):
            return "rewritten", "dropped: the current device is set above"
        if known == "cuda":
            into.setup.append(lambda: self._set(file, value, at))
        else:
            into.setup.append(lambda: self._guarded(file, value, at))
        return "rewritten", "the current device is set instead"

    @staticmethod
    def _has_mesh(translation: Translation, file: File) -> bool:
        for name in ("device_mesh", "process_group"):
            if (given := translation.value(name)) is not None and not is_none(given):
                return True
        strategy = translation.value("sharding_strategy")
        if strategy is None or is_none(strategy):
            return False
        found = file.api(file.values.only(strategy))
        return found is None or any(part in str(found.member) for part in _TWO_DIMENSIONS)

    @staticmethod
    def _set(file: File, value: cst.BaseExpression, at: cst.CSTNode) -> str:
        return f"{file.name('torch.cuda.set_device', at)}({file.render(value)})"

    def _guarded(self, file: File, value: cst.BaseExpression, at: cst.CSTNode) -> str:
        device = file.render(value)
        test = f'getattr({device}, "type", "cuda") == "cuda"'
        test += f' and getattr({device}, "index", 0) is not None'
        return f"if {test}:\n    {self._set(file, value, at)}"
