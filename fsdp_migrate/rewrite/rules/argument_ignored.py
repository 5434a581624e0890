from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import (
    Argument,
    Translation,
)


class IgnoredArgument(ArgumentRule):
    """
    `ignored_modules=`, `ignored_states=` and `ignored_parameters=` become `ignored_params=`.

    That argument came with torch 2.7; for an older `--target-torch` the call is left, unless
    the value is None.
    """

    name = "ignored"
    arguments = ("ignored_modules", "ignored_states", "ignored_parameters")
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, ignored_modules=[model.codebook])
            """,
            after="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                # TODO(fsdp-migrate): wrap-call ignored_modules: needs --target-torch 2.7
                model = FSDP(model, ignored_modules=[model.codebook])
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file = argument.value, into.file
        plain = file.values.only(value)
        empty = isinstance(plain, cst.List | cst.Tuple) and not plain.elements
        if is_none(plain) or empty:
            return "rewritten", "nothing is ignored"
        if file.options.target_torch < (2, 7):
            raise Undecided(f"{argument.name}: needs --target-torch 2.7")
        if argument.name == "ignored_parameters":
            into.keywords.append(("ignored_params", lambda: f"set({file.render(value)})"))
            return "rewritten", "the same parameters"
        if argument.name == "ignored_states" and not self._are_modules(file, plain):
            raise Undecided("ignored_states: are these modules or parameters?")

        def params() -> str:
            return (
                f"{{param for ignored in {file.render(value)} for param in ignored.parameters()}}"
            )

        into.keywords.append(("ignored_params", params))
        return "differs", "their parameters; clip_grad_norm_ needs them apart from the sharded ones"

    @staticmethod
    def _are_modules(file: File, value: cst.BaseExpression) -> bool:
        return not any(word in file.tree.code(value) for word in ("param", "weight", "bias"))
