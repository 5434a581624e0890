from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.rule import Example, Rule

_WHY = {
    "StateDictType": "FSDP2 has no kinds of state dict to set; say it in StateDictOptions",
    "BackwardPrefetch": "FSDP2 has no such setting",
    "OptimStateKeyType": "FSDP2's optimizer states are keyed by name only",
    "FlatParameter": "FSDP2 has no flat parameters",
    "FlatParamHandle": "FSDP2 has no flat parameters",
    "composable.fully_shard": "the first fully_shard (FSDP1 inside): another function of that name",
}
_CONFIGS = frozenset(name for name in api.CLASSES if name.endswith(("Config", "Settings")))


class Leftovers(Rule):
    """
    Whatever use of FSDP1 no other rule has dealt with is named and left for a human.

    Wrap policies and the first checkpoint functions still exist beside FSDP2: where they are
    used apart from FSDP1 they stay, and the report says so.
    """

    name = "leftovers"
    sweeps = True
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                wrapper = FSDP
            """,
            after="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                # TODO(fsdp-migrate): leftovers FSDP is handed on as a value
                wrapper = FSDP
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.all_uses):
            if not file.open(use.node):
                continue
            if use.api.name in api.POLICIES:
                file.skipped(use.node, "works beside FSDP2 as it is", use.api)
            elif use.api.name.startswith("dcp."):
                file.skipped(use.node, "deprecated, but no matter of FSDP1", use.api)
            elif self._is_stale(file, use.node):
                file.skipped(use.node, "nothing in the run uses it any more", use.api)
            else:
                file.todo(use.node, use.api, self._why(use))

    @staticmethod
    def _why(use: Use) -> str:
        name, member = use.api.name, use.api.member
        if name == api.FSDP and member is None:
            return "FSDP is handed on as a value"
        if name == api.FSDP:
            return f"FSDP2 has no counterpart of {member}"
        if name in _CONFIGS:
            return "which state dict call it configures cannot be seen here"
        return _WHY.get(name, f"FSDP2 has no {name}")

    @staticmethod
    def _is_stale(file: File, node: cst.CSTNode) -> bool:
        return file.edits.is_rebuilt(file.tree.statement(node))
