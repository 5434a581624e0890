from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.names import string_value
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.values import is_none

_PARAMETERS = (
    "device",
    "init_scale",
    "backoff_factor",
    "growth_factor",
    "growth_interval",
    "enabled",
    "process_group",
)


class ShardedScaler(Rule):
    """
    `ShardedGradScaler` becomes `torch.amp.GradScaler`.

    On DTensor gradients the plain scaler's search for infinities already spans all ranks, so a
    process group is not needed. The two order their positional arguments differently: past the
    device they are passed by name.
    """

    name = "grad-scaler"
    examples = (
        Example(
            before="""
                import torch
                from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

                scaler = ShardedGradScaler(enabled=fp16, process_group=group)
            """,
            after="""
                import torch

                scaler = torch.amp.GradScaler("cuda", enabled=fp16)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses("ShardedGradScaler")):
            call = use.call
            if call is None:
                above = file.tree.parent(use.node)
                if isinstance(above, cst.Arg) and isinstance(file.tree.parent(above), cst.ClassDef):
                    file.todo(use.node, use.api, "a subclass of the scaler: derive from GradScaler")
                    continue
                node = use.node
                file.edits.replace(node, lambda node=node: file.name("torch.amp.GradScaler", node))  # type: ignore[misc]
                file.rewritten(node, use.api, "torch.amp.GradScaler")
            elif any(arg.star for arg in call.args):
                file.todo(use.node, use.api, "which arguments are starred in cannot be seen here")
            else:
                self._call(file, use, call)

    @staticmethod
    def _call(file: File, use: Use, call: cst.Call) -> None:
        given: dict[str, cst.BaseExpression] = {}
        first = next((arg.value for arg in call.args if arg.keyword is None), None)
        old = isinstance(first, cst.Integer | cst.Float | cst.BinaryOperation)  # torch < 2.3
        names = _PARAMETERS[1:] if old else _PARAMETERS
        for position, arg in enumerate(call.args):
            given[arg.keyword.value if arg.keyword else names[position]] = arg.value
        group = given.pop("process_group", None)
        device = given.pop("device", None)

        def text() -> str:
            kind = '"cuda"' if device is None else file.render(device)
            passed = [kind, *(f"{name}={file.render(value)}" for name, value in given.items())]
            return file.call(file.name("torch.amp.GradScaler", use.node), passed, call)

        file.edits.replace(call, text)
        where = string_value(device) or "cuda"
        dropped = "" if group is None or is_none(group) else "; infinities are found on all ranks"
        file.rewritten(use.node, use.api, f"torch.amp.GradScaler on {where}{dropped}")
