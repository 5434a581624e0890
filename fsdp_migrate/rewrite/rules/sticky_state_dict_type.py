from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.undecided import Undecided


class StickyStateDictType(Rule):
    """
    `FSDP.set_state_dict_type(...)` goes: FSDP2 has no kind that stays set.

    Every later state dict call of the model says its kind itself. That needs one kind to be in
    force: the last call before it in its function, or the only one of the run.
    """

    name = "sticky-state-dict-type"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import StateDictType

                FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
                state = model.state_dict()
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import get_model_state_dict

                state = get_model_state_dict(model)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses(api.FSDP, "set_state_dict_type")):
            try:
                self._one(file, use.call)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            file.rewritten(use.node, use.api, "each state dict call names its own kind")
        for use in list(file.uses(api.FSDP, "get_state_dict_type")):
            message = "FSDP2 has no kind that is set; drop what saves and restores it"
            file.todo(use.node, use.api, message)

    @staticmethod
    def _one(file: File, call: cst.Call | None) -> None:
        statement = file.tree.statement(call) if call is not None else None
        if call is None or not isinstance(statement, cst.Expr) or statement.value is not call:
            raise Undecided("its result (the previous settings) is used")
        file.modes.read(call)
        for arg in call.args:
            file.values.consume(arg)
            file.cover_below(arg)
        file.edits.remove(statement)
