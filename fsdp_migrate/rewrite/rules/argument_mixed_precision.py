from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import Argument, Translation


def or_default(file: File, value: cst.BaseExpression, default: str, at: cst.CSTNode) -> str:
    """The text of `value` with None, which fully_shard refuses, made the default object."""
    empty = f"{file.fsdp2(default, at)}()"
    if isinstance(value, cst.IfExp):
        body = or_default(file, value.body, default, at)
        orelse = or_default(file, value.orelse, default, at)
        return f"{body} if {file.render(value.test)} else {orelse}"
    if is_none(value):
        return empty
    if isinstance(value, cst.Call) and file.api(value.func):
        return file.render(value)
    leaves = file.values.leaves(value)
    sure = all(isinstance(leaf, cst.Call) and file.api(leaf.func) for leaf in leaves)
    text = file.render(value)
    return text if sure else f"{text} or {empty}"


class MixedPrecisionArgument(ArgumentRule):
    """
    `mixed_precision=` becomes `mp_policy=`; None, which `fully_shard` refuses, the default object.

    FSDP1 left the inputs of inner units alone (`cast_forward_inputs=False`); FSDP2 casts floating
    inputs of every unit to `param_dtype`. That only matters where a block receives an input of
    another floating dtype, such as a rotary table; `--exact` keeps FSDP1's way.
    """

    name = "mixed-precision-argument"
    arguments = ("mixed_precision",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

                mp = MixedPrecision(param_dtype=bf16)
                model = FSDP(model, mixed_precision=mp if amp else None)
            """,
            after="""
                from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

                mp = MixedPrecisionPolicy(param_dtype=bf16)
                fully_shard(model, mp_policy=mp if amp else MixedPrecisionPolicy())
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file, at = argument.value, into.file, into.at
        if is_none(value):
            return "rewritten", "no mixed precision is the default"
        into.keywords.append(
            ("mp_policy", lambda: or_default(file, value, "MixedPrecisionPolicy", at))
        )
        return (
            "differs",
            "units cast their floating inputs to param_dtype; FSDP1's inner ones did not",
        )
