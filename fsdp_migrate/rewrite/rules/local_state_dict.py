from __future__ import annotations

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule


class LocalStateDict(Rule):
    """
    LOCAL_STATE_DICT becomes the sharded kind, whose files are not the same.

    The code saves and loads again, but files written by FSDP1 in its local kind (flat
    parameters) do not load: convert those first. So this is done only when asked for.
    """

    name = "local-state-dict"
    unsafe = True
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import StateDictType

                with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                    state = model.state_dict()
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import get_model_state_dict

                state = get_model_state_dict(model)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        file.modes.local_is_sharded = True
