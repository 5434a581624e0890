from __future__ import annotations

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.skips import MARKER


class DualPath(Rule):
    """
    A file that already holds both FSDP1 and FSDP2 is reported and left.

    Which of its branches is meant to stay is the user's to say; rewriting the FSDP1 branch
    would give two FSDP2 branches.
    """

    name = "dual-path"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

                model = fully_shard(model) if version == 2 else FSDP(model)
            """,
            after="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard

                model = fully_shard(model) if version == 2 else FSDP(model)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        wraps = [use for use in file.all_uses if use.api == api.Api(api.FSDP) and use.call]
        if not wraps or not self._shards(file) or MARKER in file.tree.module.code:
            return
        for use in list(file.all_uses):
            file.skipped(use.node, "the file holds both FSDP1 and FSDP2", use.api)
        file.dual = True

    @staticmethod
    def _shards(file: File) -> bool:
        homes = (f"{api.HOME}.", f"{api.BEFORE_PUBLIC}.", "torch.distributed._composable.")
        return any(
            name.endswith(".fully_shard") and name.startswith(homes)
            for name in file.names.imported()
        )
