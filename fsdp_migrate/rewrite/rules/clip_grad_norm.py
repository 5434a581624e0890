from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import arguments
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.values import argument
from fsdp_migrate.rewrite.wrap import Undecided

_TORCH = frozenset({"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"})


class ClipGradNorm(Rule):
    """
    `model.clip_grad_norm_(...)` becomes `torch.nn.utils.clip_grad_norm_` over its parameters.

    That function returns a DTensor. Where the result is used, `.full_tensor()` makes it the
    global norm: on older torch versions `.item()` alone would be this rank's part.
    """

    name = "clip-grad-norm"
    examples = (
        Example(
            before="""
                import torch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                model.clip_grad_norm_(1.0)
                norm = model.clip_grad_norm_(1.0).item()
            """,
            after="""
                import torch
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for call in file.tree.all(cst.Call):
            func = call.func
            if not isinstance(func, cst.Attribute) or func.attr.value != "clip_grad_norm_":
                continue
            if file.qualified(func) in _TORCH:
                self._function(file, call)
            elif self._is_fsdp(file, call, func) and file.open(call):
                self._method(file, call, func)

    @staticmethod
    def _is_fsdp(file: File, call: cst.Call, func: cst.Attribute) -> bool:
        """Only FSDP models have this method taking a norm first; accelerate's takes parameters."""
        if file.models.is_model(func.value):
            return True
        if not file.has_fsdp or not call.args or file.qualified(func):
            return False
        if dotted(func.value) == "self" and self_defines(file, func):
            return False
        first = call.args[0]
        by_name = first.keyword.value if first.keyword else None
        passes_parameters = by_name == "parameters" or "param" in file.tree.code(first.value)
        return not passes_parameters

    @staticmethod
    def _method(file: File, call: cst.Call, func: cst.Attribute) -> None:
        what = f"{file.tree.code(func.value)}.clip_grad_norm_"
        try:
            given = arguments(call, ("max_norm", "norm_type"))
        except Undecided as reason:
            file.todo(call, what, str(reason))
            return
        used = not isinstance(file.tree.parent(call), cst.Expr)

        def text() -> str:
            clip = file.name("torch.nn.utils.clip_grad_norm_", call)
            passed = [f"{file.render(func.value)}.parameters()", file.render(given["max_norm"])]
            if "norm_type" in given:
                passed.append(f"norm_type={file.render(given['norm_type'])}")
            made = f"{clip}({', '.join(passed)})"
            return f"{made}.full_tensor()" if used else made

        file.edits.replace(call, text)
        file.rewritten(call, what, "the same norm" + (", as a whole tensor" if used else ""))

    @staticmethod
    def _function(file: File, call: cst.Call) -> None:
        """torch's own function on an FSDP model: FSDP1 clipped by this rank's part of the norm."""
        first = argument(call, "parameters", 0)
        if first is None or not isinstance(first.value, cst.Call):
            return
        inner = first.value.func
        if not isinstance(inner, cst.Attribute) or inner.attr.value != "parameters":
            return
        if not file.models.is_model(inner.value) or not file.open(call):
            return
        message = "clips by the global norm, a DTensor; FSDP1 clipped by each rank's part"
        file.differs(call, "torch.nn.utils.clip_grad_norm_", message)


def self_defines(file: File, func: cst.Attribute) -> bool:
    """Whether `self.name` is a method of the class around."""
    holder = file.tree.nearest(func, cst.ClassDef)
    return holder is not None and any(
        isinstance(node, cst.FunctionDef) and node.name.value == func.attr.value
        for node in walk(holder)
    )
