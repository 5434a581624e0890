from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api, snippets
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.forwards import computing_calls, register
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import arguments
from fsdp_migrate.rewrite.values import truth
from fsdp_migrate.rewrite.wrap import Undecided

_PARAMETERS = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")


class SummonFullParams(Rule):
    """
    `FSDP.summon_full_params(...)`: around computation it goes, around reads it is kept by a helper.

    Where the block calls the model (`generate`, a forward pass), FSDP2 gathers by itself once the
    method is registered. Elsewhere a helper puts whole parameters in place and, where FSDP1 did,
    writes changes back.
    """

    name = "summon-full-params"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                with FSDP.summon_full_params(model, writeback=False, recurse=False):
                    text = model.generate(batch)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

                fully_shard(model)
                register_fsdp_forward_method(model, "generate")
                text = model.generate(batch)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses(api.FSDP, "summon_full_params")):
            try:
                if use.call is None:
                    raise Undecided("the method is passed on as a value")
                message = self._one(file, use.call)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            record = file.differs if "every rank" in message else file.rewritten
            record(use.node, use.api, message)

    def _one(self, file: File, call: cst.Call) -> str:
        given = arguments(call, _PARAMETERS)
        model = given.get("module")
        if model is None:
            raise Undecided("which module is meant cannot be seen here")
        if "with_grads" in given and truth(given["with_grads"]) is not False:
            raise Undecided("with_grads: whole gradients have to be gathered by hand")
        item = file.tree.parent(call)
        block = file.tree.parent(item) if isinstance(item, cst.WithItem) else None
        scope = block if isinstance(block, cst.With) else file.tree.function(call)
        calls = computing_calls(file, scope, model) if scope is not None else []
        if calls:
            registered = [register(file, model, one) for one in calls]
            if not all(registered):
                raise Undecided("register the methods called inside where the model is sharded")
            if isinstance(block, cst.With) and isinstance(item, cst.WithItem):
                file.unwrap(block, item)
            else:
                null = "contextlib.nullcontext"
                file.edits.replace(call, lambda: f"{file.name(null, call)}()")
            return "FSDP2 gathers for the calls inside"
        return self._helper(file, call, model, given)

    @staticmethod
    def _helper(
        file: File,
        call: cst.Call,
        model: cst.BaseExpression,
        given: dict[str, cst.BaseExpression],
    ) -> str:
        kept = [name for name in ("writeback", "offload_to_cpu") if name in given]
        kept = [name for name in kept if truth(given[name]) is not (name == "writeback")]

        def text() -> str:
            passed = [f"{name}={file.render(given[name])}" for name in kept]
            return f"{snippets.full_params(file)}({', '.join([file.render(model), *passed])})"

        file.edits.replace(call, text)
        alone = given.get("rank0_only")
        if alone is not None and truth(alone) is not False:
            return "whole parameters, on every rank rather than rank 0 alone"
        return "whole parameters in full precision, through a helper"
