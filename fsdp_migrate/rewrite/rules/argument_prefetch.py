from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import is_none, truth
from fsdp_migrate.rewrite.wrap import Argument, Translation


class ForwardPrefetchArgument(ArgumentRule):
    """
    `forward_prefetch=True` becomes explicit prefetching of the next unit.

    FSDP2 already prefetches while the CPU runs ahead; the explicit form only issues it earlier.
    """

    name = "forward-prefetch"
    arguments = ("forward_prefetch",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, forward_prefetch=True)
            """,
            after="""
                from torch.distributed.fsdp import FSDPModule, fully_shard

                fully_shard(model)
                units = [module for module in model.modules() if isinstance(module, FSDPModule)]
                for unit, following in zip(units[1:], units[2:]):
                    unit.set_modules_to_forward_prefetch([following])
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file, at = argument.value, into.file, into.at
        if truth(value) is False or is_none(value):
            return "rewritten", "dropped: no explicit prefetch is the default"
        into.after.append(lambda model: self._loop(file, value, model, at))
        return "differs", "explicit prefetch of the next unit, in module order"

    @staticmethod
    def _loop(file: File, value: cst.BaseExpression, model: str, at: cst.CSTNode) -> str:
        units = file.needs.local("units", at, avoid=model)
        kind = file.fsdp2("FSDPModule", at)
        lines = [
            f"{units} = [module for module in {model}.modules() if isinstance(module, {kind})]",
            f"for unit, following in zip({units}[1:], {units}[2:]):",
            "    unit.set_modules_to_forward_prefetch([following])",
        ]
        if truth(value) is None:
            lines = [f"if {file.render(value)}:", *(f"    {line}" for line in lines)]
        return "\n".join(lines)
