from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.wrap import Undecided


class StrategyValue(Rule):
    """
    A `ShardingStrategy` or `StateDictType` that travels (in a config, a dict) goes by its name.

    FSDP2 has no such enums. Members become strings of the same name, look-ups by name become the
    name itself, and the wrap asks a helper what the name means. Unknown names are an error
    there, as they were for the enum.
    """

    name = "strategy-value"
    sweeps = True
    examples = (
        Example(
            before="""
                import torch
                import torch.distributed as dist
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import ShardingStrategy

                def strategy(name: str) -> ShardingStrategy:
                    return ShardingStrategy[name]

                default = ShardingStrategy.FULL_SHARD
            """,
            after="""
                import torch
                import torch.distributed as dist

                def strategy(name: str) -> str:
                    return name

                default = "FULL_SHARD"
            """,
        ),
    )

    def decide(self, file: File) -> None:
        left = any(site.state == "todo" and site.rule == "wrap-call" for site in file.sites)
        if left and not file.strategy_by_name:
            return  # a call that is left as it is may still take the enum
        for use in list(file.all_uses):
            if use.api.name not in self._enums(file) or not file.open(use.node):
                continue
            try:
                message = self._one(file, use)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            file.rewritten(use.node, use.api, message)

    @staticmethod
    def _enums(file: File) -> tuple[str, ...]:
        """StateDictType too, once no call that is left can still be given one."""
        return ("ShardingStrategy",) if file.modes.left else ("ShardingStrategy", "StateDictType")

    def _one(self, file: File, use: Use) -> str:
        above = file.tree.parent(use.node)
        if use.api.member is not None:
            return self._member(file, use, above)
        if isinstance(above, cst.Subscript) and above.value is use.node:
            index = above.slice[0].slice
            assert isinstance(index, cst.Index)
            file.edits.replace(above, lambda: file.render(index.value))
            return "the name itself"
        if isinstance(above, cst.Arg):
            call = file.tree.parent(above)
            if (
                isinstance(call, cst.Call)
                and dotted(call.func) == "getattr"
                and len(call.args) == 2
            ):
                name = call.args[1].value
                file.edits.replace(call, lambda: file.render(name))
                return "the name itself"
        if _in_annotation(file, use.node):
            file.edits.replace(use.node, lambda: "str")
            return "a name"
        raise Undecided("FSDP2 has no such enum; use the names")

    @staticmethod
    def _member(file: File, use: Use, above: cst.CSTNode | None) -> str:
        name = use.api.member
        if isinstance(above, cst.Attribute):
            if above.attr.value != "name":
                raise Undecided("FSDP2 has no such enum; use the names")
            file.edits.replace(above, lambda: f'"{name}"')
            return "the name itself"
        if isinstance(above, cst.ComparisonTarget) and isinstance(
            above.operator, cst.Is | cst.IsNot
        ):
            raise Undecided("names are compared with ==, not `is`")
        if str(name).startswith("__"):
            raise Undecided("FSDP2 has no such enum; use the names")
        file.edits.replace(use.node, lambda: f'"{name}"')
        return "its name"


def _in_annotation(file: File, node: cst.CSTNode) -> bool:
    for above in file.tree.ancestors(node):
        if isinstance(above, cst.Annotation | cst.SubscriptElement):
            return True
        if not isinstance(above, cst.Index | cst.BinaryOperation):
            return False
    return False
