from __future__ import annotations

import re

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.names import dotted, string_value
from fsdp_migrate.rewrite.rule import Example, Rule

_TYPES = {
    api.FSDP: "FSDPModule",
    "MixedPrecision": "MixedPrecisionPolicy",
    "CPUOffload": "OffloadPolicy",
}
_CHECKS = ("isinstance", "issubclass")
_WITHIN = (cst.Tuple, cst.Element, cst.Arg, cst.BinaryOperation, cst.Index)


class ModelType(Rule):
    """
    `FSDP` as a type (isinstance, annotations, unions, strings in annotations) is `FSDPModule`.

    A sharded module keeps its own class and becomes an `FSDPModule` as well.
    """

    name = "model-type"
    examples = (
        Example(
            before="""
                from typing import Union
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                def save(m: Union[nn.Module, FSDP], ema: "FSDP | None") -> FSDP:
                    assert isinstance(m, (FSDP, DDP))
            """,
            after="""
                from typing import Union
                from torch.distributed.fsdp import FSDPModule

                def save(m: Union[nn.Module, FSDPModule], ema: "FSDPModule | None") -> FSDPModule:
                    assert isinstance(m, (FSDPModule, DDP))
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.all_uses):
            new = _TYPES.get(use.api.name)
            if new is None or use.api.member or use.call or not self._is_type(file, use):
                continue
            if file.open(use.node):
                node = use.node
                file.edits.replace(node, lambda node=node, new=new: file.fsdp2(new, node))  # type: ignore[misc]
                file.rewritten(node, use.api, new)
        for string in file.tree.all(cst.SimpleString):
            self._string(file, string)

    @staticmethod
    def _is_type(file: File, use: Use) -> bool:
        for above in file.tree.ancestors(use.node):
            if isinstance(above, cst.Annotation | cst.SubscriptElement):
                return True
            if isinstance(above, cst.Call):
                if dotted(above.func) in _CHECKS and len(above.args) == 2:
                    return file.tree.inside(use.node, above.args[1])
                return (dotted(above.func) or "").split(".")[-1] == "cast"
            if not isinstance(above, _WITHIN):
                return False
        return False

    @staticmethod
    def _string(file: File, string: cst.SimpleString) -> None:
        annotation = file.tree.nearest(string, cst.Annotation)
        if (
            annotation is None
            or file.tree.statement(string) is file.tree.nearest(annotation, cst.FunctionDef) is None
        ):
            return
        text = string_value(string) or ""
        for word in set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text)):
            found = file.names.lookup(word, string)
            origins = {
                file.project.origin(one.qualified, file.path) for one in found if one.qualified
            }
            known = api.find(origins.pop()) if len(origins) == 1 else None
            type_name = _TYPES.get(known.name) if known and not known.member else None
            if type_name is not None:
                if not file.open(string):
                    return
                new = re.sub(rf"\b{word}\b", type_name, string.value)
                statement = file.tree.statement(string)

                def made(
                    new: str = new, name: str = type_name, statement: cst.CSTNode = statement
                ) -> str:
                    file.fsdp2(name, statement)
                    return new

                file.edits.replace(string, made)
                file.rewritten(string, word, f"{type_name}, in a string annotation")
                return
