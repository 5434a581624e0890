from __future__ import annotations

from dataclasses import replace

import libcst as cst

from fsdp_migrate.rewrite.file import File, Wrapped
from fsdp_migrate.rewrite.names import dotted, names_in
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.values import argument

_HOME = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_APPLY = f"{_HOME}.apply_activation_checkpointing"


class ActivationCheckpointing(Rule):
    """
    Activation checkpointing that was applied after wrapping is applied before sharding.

    Then `fully_shard` lands outside the checkpoint wrapper, as FSDP1's wrapper did. Where both
    pick the same blocks, the loop over units picks the checkpoint wrappers.
    """

    name = "activation-checkpointing"
    examples = (
        Example(
            before="""
                from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                    apply_activation_checkpointing,
                )
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import ModuleWrapPolicy

                model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
                apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
            """,
            after="""
                from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
                    CheckpointWrapper,
                    apply_activation_checkpointing,
                )
                from torch.distributed.fsdp import fully_shard

                apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
                for module in reversed(list(model.modules())):
                    if module is not model and isinstance(module, CheckpointWrapper):
                        fully_shard(module)
                fully_shard(model)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for wrapped in file.wraps:
            self._after(file, wrapped)

    def _after(self, file: File, wrapped: Wrapped) -> None:
        block = file.tree.block(wrapped.statement)
        if wrapped.statement not in block:
            return
        later = block[block.index(wrapped.statement) + 1 :]
        for position, statement in enumerate(later):
            call = self._applied(file, statement, wrapped)
            if call is None or not file.open(call):
                continue
            needed = _needed(file, later[:position], statement, wrapped)
            what = "apply_activation_checkpointing"
            if needed is None:
                file.todo(call, what, "move this, and what it needs, before fully_shard")
                continue
            for moved in (*needed, statement):
                file.edits.move(moved, before=wrapped.statement)
            self._shard_wrappers(file, wrapped, call, statement)
            file.rewritten(call, what, "moved before sharding, as FSDP1's wrapper was outside")

    @staticmethod
    def _applied(file: File, statement: cst.CSTNode, wrapped: Wrapped) -> cst.Call | None:
        """The call in `statement` that checkpoints the wrapped model, alone or under an `if`."""
        for node in walk(statement):
            if not isinstance(node, cst.Call) or not node.args:
                continue
            if file.qualified(node.func) == _APPLY or _wraps_apply(file, node):
                model = file.tree.code(node.args[0].value)
                alone = isinstance(statement, cst.Expr) and statement.value is node
                if model in wrapped.names and (alone or _only_if(statement, node)):
                    return node
        return None

    @staticmethod
    def _shard_wrappers(
        file: File, wrapped: Wrapped, call: cst.Call, statement: cst.CSTNode
    ) -> None:
        units = wrapped.translation.units
        classes = _checked_classes(file, call)
        if units is None or classes is None or units.classes != (classes,):
            return
        wrapper = file.name(f"{_HOME}.CheckpointWrapper", call)
        if isinstance(statement, cst.If):
            if any(isinstance(node, cst.Call) for node in walk(statement.test)):
                return
            wrapper = f"{wrapper} if {file.tree.code(statement.test)} else {classes}"
        wrapped.translation.units = replace(
            units, predicate=lambda variable: f"isinstance({variable}, {wrapper})"
        )


def _only_if(statement: cst.CSTNode, call: cst.Call) -> bool:
    """`if cond:` around the call and nothing that could belong after the wrapping."""
    if not isinstance(statement, cst.If) or statement.orelse is not None:
        return False
    kept = (cst.Expr, cst.Assign, cst.ImportFrom, cst.Import)
    body = statement.body.body
    smalls = [s for line in body if isinstance(line, cst.SimpleStatementLine) for s in line.body]
    lines = all(isinstance(line, cst.SimpleStatementLine) for line in body)
    calls = [small for small in smalls if isinstance(small, cst.Expr)]
    return (
        lines and all(isinstance(s, kept) for s in smalls) and any(c.value is call for c in calls)
    )


def _wraps_apply(file: File, call: cst.Call) -> bool:
    """A function of this file that applies checkpointing to its first parameter."""
    text = dotted(call.func)
    if text is not None and file.project.checkpoints(text.split(".")[-1]):
        return True
    for binding in file.values.bindings(call.func):
        function = binding.definition
        if isinstance(function, cst.FunctionDef) and function.params.params:
            first = function.params.params[0].name.value
            for node in walk(function.body):
                if file.is_call(node, _APPLY) and isinstance(node, cst.Call) and node.args:
                    return dotted(node.args[0].value) == first
    return False


def _needed(
    file: File, between: list[cst.CSTNode], statement: cst.CSTNode, wrapped: Wrapped
) -> list[cst.CSTNode] | None:
    """The statements between that `statement` depends on; None if they cannot move."""
    wanted = set(names_in(statement))
    heads = {name.split(".")[0] for name in wrapped.names}
    needed: list[cst.CSTNode] = []
    for earlier in reversed(between):
        bound = bound_names(earlier)
        if not bound & (wanted - heads):
            continue
        movable = isinstance(
            earlier, cst.Assign | cst.FunctionDef | cst.Import | cst.ImportFrom
        ) and not (heads & set(names_in(earlier)))
        if not movable or file.edits.is_rebuilt(earlier):
            return None
        needed.insert(0, earlier)
        wanted |= set(names_in(earlier))
    return needed


def bound_names(statement: cst.CSTNode) -> set[str]:
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return {statement.name.value}
    found: set[str] = set()
    for node in walk(statement):
        if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.For):
            found |= set(names_in(node.target))
        elif isinstance(node, cst.ImportAlias):
            name = node.asname.name if node.asname else node.name
            found.add((dotted(name) or "").split(".")[0])
    return found


def _checked_classes(file: File, call: cst.Call) -> str | None:
    """The classes that `check_fn` asks for, if that is all it does."""
    given = argument(call, "check_fn", 2)
    if given is None:
        return None
    check = file.values.only(given.value)
    body: cst.BaseExpression | None = None
    if isinstance(check, cst.Lambda):
        body = check.body
    elif isinstance(check, cst.Name):
        found = file.values.bindings(check)
        if len(found) == 1 and isinstance(found[0].definition, cst.FunctionDef):
            from fsdp_migrate.rewrite.units import only_return

            body = only_return(found[0].definition)
    if isinstance(body, cst.Call) and dotted(body.func) == "isinstance" and len(body.args) == 2:
        return file.tree.code(body.args[1].value)
    return None
