from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.argument_mixed_precision import or_default
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import argument, is_none, truth
from fsdp_migrate.rewrite.wrap import Argument, Translation


def offloads(call: cst.Call) -> bool | None:
    """Whether a CPUOffload(...) offloads; None when only the run can tell."""
    given = argument(call, "offload_params", 0)
    return False if given is None else truth(given.value)


class CpuOffloadArgument(ArgumentRule):
    """`cpu_offload=` becomes `offload_policy=`; what does not offload is left out."""

    name = "cpu-offload-argument"
    arguments = ("cpu_offload",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP

                model = FSDP(model, cpu_offload=CPUOffload(offload_params=True) if low else None)
            """,
            after="""
                from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

                fully_shard(model, offload_policy=CPUOffloadPolicy() if low else OffloadPolicy())
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file, at = argument.value, into.file, into.at
        leaves = file.values.leaves(value)
        if all(self._off(file, leaf) for leaf in leaves):
            if isinstance(value, cst.Name):
                file.values.consume(value)
            if isinstance(value, cst.Call):
                file.covered(value.func)
            return "rewritten", "no offload is the default"
        into.keywords.append(
            ("offload_policy", lambda: or_default(file, value, "OffloadPolicy", at))
        )
        return (
            "differs",
            "CPUOffloadPolicy; clipping needs a CPU backend (cpu:gloo,cuda:nccl)",
        )

    @staticmethod
    def _off(file: File, leaf: cst.BaseExpression) -> bool:
        if is_none(leaf):
            return True
        if isinstance(leaf, cst.Call) and (found := file.api(leaf.func)):
            return found.name == "CPUOffload" and offloads(leaf) is False
        return False


class CpuOffloadObject(Rule):
    """`CPUOffload(...)` becomes `CPUOffloadPolicy()`, or `OffloadPolicy()` without offload."""

    name = "cpu-offload"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import CPUOffload

                offload = CPUOffload(offload_params=args.offload)
            """,
            after="""
                from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

                offload = CPUOffloadPolicy() if args.offload else OffloadPolicy()
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses("CPUOffload")):
            if use.call is None:
                continue
            call, node = use.call, use.node
            if any(arg.star for arg in call.args):
                file.todo(node, use.api, "which fields a starred argument sets cannot be seen")
                continue
            file.edits.replace(call, lambda call=call, node=node: self._text(file, call, node))  # type: ignore[misc]
            file.rewritten(node, use.api, "the offload policy of the same meaning")

    @staticmethod
    def _text(file: File, call: cst.Call, node: cst.CSTNode) -> str:
        known = offloads(call)
        if known is not None:
            return f"{file.fsdp2('CPUOffloadPolicy' if known else 'OffloadPolicy', node)}()"
        given = argument(call, "offload_params", 0)
        assert given is not None
        yes, no = file.fsdp2("CPUOffloadPolicy", node), file.fsdp2("OffloadPolicy", node)
        return f"{yes}() if {file.render(given.value)} else {no}()"
