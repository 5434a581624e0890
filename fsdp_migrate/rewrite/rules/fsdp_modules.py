from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import arguments
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import truth


class FsdpModules(Rule):
    """`FSDP.fsdp_modules(model)` becomes a list of the `FSDPModule`s in it."""

    name = "fsdp-modules"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                for module in FSDP.fsdp_modules(model):
                    print(module)
            """,
            after="""
                from torch.distributed.fsdp import FSDPModule

                for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
                    print(module)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses(api.FSDP, "fsdp_modules")):
            call = use.call
            try:
                if call is None:
                    raise Undecided("the method is passed on as a value")
                given = arguments(call, ("module", "root_only"))
                if "root_only" in given and truth(given["root_only"]) is not False:
                    raise Undecided("root_only=True: FSDP2 does not tell root modules apart")
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            file.edits.replace(call, lambda call=call, given=given: self._text(file, call, given))  # type: ignore[misc]
            file.rewritten(use.node, use.api, "the FSDPModules among modules()")

    @staticmethod
    def _text(file: File, call: cst.Call, given: dict[str, cst.BaseExpression]) -> str:
        kind = file.fsdp2("FSDPModule", call)
        model = file.render(given["module"])
        return f"[m for m in {model}.modules() if isinstance(m, {kind})]"
