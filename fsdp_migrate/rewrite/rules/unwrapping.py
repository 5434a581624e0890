from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted, string_value
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.values import argument

_INNER = "_fsdp_wrapped_module"


class Unwrapping(Rule):
    """
    The wrapped module is the model itself now: `.module` and `._fsdp_wrapped_module` go.

    `.module` only where the receiver is surely FSDP, since DDP has it too. Code that strips
    the prefix from parameter names finds nothing to strip, and stays.
    """

    name = "unwrapping"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                config = model.module.config
                inner = getattr(model, "_fsdp_wrapped_module", model)
                block = layer._fsdp_wrapped_module
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                config = model.config
                inner = model
                block = layer
            """,
        ),
    )

    def decide(self, file: File) -> None:
        if not file.is_fsdp1:
            return
        for node in file.tree.all(cst.Attribute):
            name = node.attr.value
            if name not in ("module", _INNER) or file.qualified(node):
                continue
            sure = name == _INNER or (
                file.models.is_model(node.value) and not file.models.may_be_ddp(node.value)
            )
            if sure and file.open(node):
                self._attribute(file, node)
        for call in file.tree.all(cst.Call):
            self._getattr(file, call)
        for string in file.tree.all((cst.SimpleString, cst.FormattedStringText)):
            self._string(file, string)

    @staticmethod
    def _attribute(file: File, node: cst.Attribute) -> None:
        what = f".{node.attr.value}"
        above = file.tree.parent(node)
        if isinstance(above, cst.AssignTarget | cst.Del | cst.AugAssign):
            file.todo(node, what, "what is to happen to the wrapped module itself?")
            return
        file.edits.replace(node, lambda: file.render(node.value))
        file.rewritten(node, what, "the model is the module itself")

    @staticmethod
    def _getattr(file: File, call: cst.Call) -> None:
        if dotted(call.func) not in ("getattr", "hasattr") or len(call.args) < 2:
            return
        name = argument(call, "name", 1)
        if name is None or string_value(name.value) != _INNER or not file.open(call):
            return
        file.covered(name.value)
        if len(call.args) == 3:
            default = call.args[2].value
            file.edits.replace(call, lambda: file.render(default))
            file.rewritten(call, _INNER, "the default: no wrapper is there any more")
        else:
            file.skipped(call, "no module has this attribute any more", _INNER)

    @staticmethod
    def _string(file: File, string: cst.CSTNode) -> None:
        text = string.value if isinstance(string, cst.FormattedStringText) else None
        text = text or string_value(string) or ""
        for name in (_INNER, "_flat_param"):
            if name in text and len(text) < 200 and file.open(string):
                file.skipped(string, "no name holds this any more; it finds nothing", f'"{name}"')
                return
