from __future__ import annotations

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import is_none, truth
from fsdp_migrate.rewrite.wrap import Argument, Translation


class DroppedArgument(ArgumentRule):
    """
    `limit_all_gathers`, `use_orig_params` and `backward_prefetch` have no place in FSDP2 and go.

    FSDP2 has no rate limiter to switch, always shows the original parameters, and prefetches
    the next unit in backward (FSDP1's BACKWARD_PRE).
    """

    name = "dropped-argument"
    arguments = ("limit_all_gathers", "use_orig_params", "backward_prefetch")
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import BackwardPrefetch
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(
                    model,
                    limit_all_gathers=True,
                    use_orig_params=True,
                    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                )
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        file = into.file
        file.values.consume(argument.value)
        if argument.name == "limit_all_gathers":
            return "rewritten", "dropped: FSDP2 has no rate limiter"
        if argument.name == "use_orig_params":
            if truth(argument.value):
                return "rewritten", "dropped: FSDP2 always shows the original parameters"
            return "differs", "dropped: the optimizer now sees the original parameters"
        return self._prefetch(argument, file)

    @staticmethod
    def _prefetch(argument: Argument, file: File) -> tuple[State, str]:
        members = []
        for leaf in file.values.leaves(argument.value):
            found = file.api(leaf)
            members.append(found.member if found else None)
            if found:
                file.covered(leaf)
        if all(member == "BACKWARD_PRE" for member in members):
            return "rewritten", "dropped: BACKWARD_PRE is what FSDP2 does"
        if is_none(argument.value):
            return "differs", "dropped: FSDP2 always prefetches in backward"
        return "differs", "dropped: FSDP2 always prefetches as BACKWARD_PRE does"
