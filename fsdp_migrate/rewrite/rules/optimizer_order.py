from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File, Wrapped
from fsdp_migrate.rewrite.names import dotted, names_in
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.activation_checkpointing import bound_names
from fsdp_migrate.rewrite.tree import walk

_SMALL = (cst.Assign, cst.AnnAssign, cst.Expr)


class OptimizerOrder(Rule):
    """
    An optimizer built before the model is sharded is built after it.

    Sharding replaces the parameters; an optimizer that holds the old ones trains nothing, in
    silence. The statements that depend on it, such as a scheduler's, move with it.
    """

    name = "optimizer-order"
    examples = (
        Example(
            before="""
                import torch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
                model = FSDP(model)
            """,
            after="""
                import torch
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for wrapped in file.wraps:
            block = file.tree.block(wrapped.statement)
            if wrapped.statement in block:
                self._before(file, wrapped, block[: block.index(wrapped.statement)])

    def _before(self, file: File, wrapped: Wrapped, earlier: list[cst.CSTNode]) -> None:
        first = next((s for s in earlier if _optimizer(file, s, wrapped)), None)
        if first is None:
            return
        call = _optimizer(file, first, wrapped)
        assert call is not None
        if not file.open(call):
            return
        moved = self._with_dependents(file, wrapped, earlier, first)
        what = file.tree.code(call.func)
        if moved is None:
            file.todo(call, what, "build the optimizer after fully_shard: it holds old parameters")
            return
        for statement in moved:
            file.edits.move(statement, after=wrapped.statement)
        file.rewritten(call, what, "built after sharding, which replaces the parameters")

    @staticmethod
    def _with_dependents(
        file: File, wrapped: Wrapped, earlier: list[cst.CSTNode], first: cst.CSTNode
    ) -> list[cst.CSTNode] | None:
        """What has to move: the optimizer, its parameter groups, and all that reads them."""
        heads = {name.split(".")[0] for name in wrapped.names}
        moved: list[cst.CSTNode] = []
        names: set[str] = set()
        wanted = set(names_in(first))
        start = earlier.index(first)
        for statement in reversed(earlier[:start]):
            if bound_names(statement) & wanted and _reads_parameters(file, statement, wrapped):
                moved.insert(0, statement)
                names |= bound_names(statement)
        for statement in earlier[start:]:
            if statement is first or set(names_in(statement)) & names:
                moved.append(statement)
                names |= bound_names(statement) - heads
        movable = all(isinstance(statement, _SMALL) for statement in moved)
        return moved if movable and not names & set(names_in(wrapped.call)) else None


def _optimizer(file: File, statement: cst.CSTNode, wrapped: Wrapped) -> cst.Call | None:
    """The optimizer that a statement builds from the parameters of the wrapped model."""
    if not isinstance(statement, cst.Assign | cst.AnnAssign):
        return None
    call = statement.value
    if not isinstance(call, cst.Call):
        return None
    origin = file.qualified(call.func) or dotted(call.func) or ""
    name = origin.split(".")[-1]
    target = file.tree.code(
        statement.targets[0].target if isinstance(statement, cst.Assign) else statement.target
    )
    is_optimizer = ".optim." in f".{origin}" or (name[:1].isupper() and "opt" in target.lower())
    if not is_optimizer or "schedul" in origin:
        return None
    for node in walk(call):
        if isinstance(node, cst.Call) and _is_parameters(file, node, wrapped):
            return call
        if isinstance(node, cst.Name):
            for binding in file.values.reaching(node):
                made = file.tree.statement(binding.node) if binding.value is not None else None
                if made is not None and _reads_parameters(file, made, wrapped):
                    return call
    return None


def _is_parameters(file: File, call: cst.Call, wrapped: Wrapped) -> bool:
    return (
        isinstance(call.func, cst.Attribute)
        and call.func.attr.value in ("parameters", "named_parameters")
        and file.tree.code(call.func.value) in wrapped.names
    )


def _reads_parameters(file: File, statement: cst.CSTNode, wrapped: Wrapped) -> bool:
    return any(
        isinstance(node, cst.Call) and _is_parameters(file, node, wrapped)
        for node in walk(statement)
    )
