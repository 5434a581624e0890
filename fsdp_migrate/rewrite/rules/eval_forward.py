from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import snippets
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.tree import walk

_NO_GRAD = ("no_grad", "inference_mode")


class EvalForward(Rule):
    """
    A forward pass without gradients whose parameters are read later is followed by a reshard.

    FSDP2 leaves the root (and, with `reshard_after_forward=False`, all units) gathered after a
    forward pass, until backward. Where none follows and the code then reads or averages the
    parameters, as with a moving average, it would meet whole tensors beside shards.
    """

    name = "eval-forward"
    examples = (
        Example(
            before="""
                import torch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model, ema = FSDP(model), None
                ema = FSDP(copy)
                for mean, param in zip(ema.parameters(), model.parameters()):
                    mean.data.lerp_(param.data, 0.1)
                with torch.no_grad():
                    loss = ema(batch)
            """,
            after="""
                import torch
                from torch.distributed.fsdp import FSDPModule, fully_shard


                def reshard(model):
                    \"\"\"Put the shards back after a forward pass that no backward follows.\"\"\"
                    for module in model.modules():
                        if isinstance(module, FSDPModule):
                            module.reshard()


                model, ema = fully_shard(model), None
                ema = fully_shard(copy)
                for mean, param in zip(ema.parameters(), model.parameters()):
                    mean.data.lerp_(param.data, 0.1)
                with torch.no_grad():
                    loss = ema(batch)
                    reshard(ema)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        if not self._reads_parameters(file):
            return
        for call in file.tree.all(cst.Call):
            func = call.func
            named = isinstance(func, cst.Name | cst.Attribute)
            if named and self._is_eval(file, call) and file.open(call):
                self._reshard(file, call, func)

    @staticmethod
    def _is_eval(file: File, call: cst.Call) -> bool:
        return _without_gradients(file, call) and file.models.is_model(call.func)

    @staticmethod
    def _reads_parameters(file: File) -> bool:
        """Whether a loop goes over a model's parameters, in step with another's or alone."""
        for loop in file.tree.all(cst.For):
            for node in walk(loop.iter):
                if (
                    isinstance(node, cst.Attribute)
                    and node.attr.value in ("parameters", "named_parameters")
                    and file.models.is_model(node.value)
                ):
                    return True
        return False

    @staticmethod
    def _reshard(file: File, call: cst.Call, func: cst.BaseExpression) -> None:
        statement = file.tree.statement(call)
        what = f"{file.tree.code(func)}(...)"
        if not isinstance(statement, cst.Assign | cst.AnnAssign | cst.Expr | cst.AugAssign):
            file.todo(call, what, "reshard the model after this: its parameters are read later")
            return
        file.edits.after(statement, lambda: f"{snippets.reshard(file)}({file.render(func)})")
        file.rewritten(call, what, "resharded after a forward pass that no backward follows")


def _without_gradients(file: File, node: cst.CSTNode) -> bool:
    for above in file.tree.ancestors(node):
        if isinstance(above, cst.With) and any(
            _says_no_grad(file, item.item) for item in above.items
        ):
            return True
        if isinstance(above, cst.FunctionDef):
            return any(_says_no_grad(file, one.decorator) for one in above.decorators)
    return False


def _says_no_grad(file: File, value: cst.BaseExpression) -> bool:
    text = file.tree.code(value.func if isinstance(value, cst.Call) else value)
    return text.split(".")[-1] in _NO_GRAD
