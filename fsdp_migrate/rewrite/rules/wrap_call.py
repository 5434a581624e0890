from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.argument_init import initialise_meta
from fsdp_migrate.rewrite.rules.argument_kwargs import literal_of
from fsdp_migrate.rewrite.rules.arguments import report, translate
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.wrap import (
    call_arguments,
)
from fsdp_migrate.rewrite.wrap_writer import Writer


class WrapCall(Rule):
    """
    `FSDP(model, ...)` becomes `fully_shard` calls: units first, the model itself last.

    `fully_shard` shards a module in place and returns it, so `model = FSDP(model)` needs no
    assignment. The wrap policy turns into a loop, children before parents. Each argument is
    another rule's business; if one of them cannot be decided, the whole call is left.
    """

    name = "wrap-call"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            """,
        ),
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import ModuleWrapPolicy

                sharded = FSDP(Net().to(rank), auto_wrap_policy=ModuleWrapPolicy({Block}))
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                sharded = Net().to(rank)
                for module in reversed(list(sharded.modules())):
                    if module is not sharded and isinstance(module, Block):
                        fully_shard(module)
                fully_shard(sharded)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        start = file.copy_state()
        while not self._decide_all(file):
            file.restore(start)

    def _decide_all(self, file: File) -> bool:
        """False when a dict turned out to be shared with a call that has to be left."""
        file.left.clear()
        for use in list(file.uses(api.FSDP)):
            if use.call is not None:
                self._decide(file, use, use.call)
        shared = {
            id(made)
            for call in file.left
            for arg in call.args
            if arg.star == "**" and (made := literal_of(file, arg.value)) is not None
        }
        fresh = (shared & set(file.keyword_dicts)) - file.spoilt
        file.spoilt |= fresh
        if fresh:
            return False
        used = {id(leaf) for one in file.wraps for leaf in file.leaves_of(one.call)}
        for call in file.left:
            file.keep_values(call, used)
        return True

    @staticmethod
    def _decide(file: File, use: Use, call: cst.Call) -> None:
        before = file.copy_state()
        try:
            arguments = list(call_arguments(call))
            module = next((one for one in arguments if one.name == "module"), None)
            if module is None:
                raise Undecided("which module is wrapped cannot be seen here")
            rest = [one for one in arguments if one.name != "module"]
            translation = translate(file, rest, call)
            initialise_meta(translation)
            Writer(file, call, module, translation).edit()
        except Undecided as reason:
            file.restore(before)
            file.todo(use.node, use.api, str(reason))
            file.cover_below(call)
            file.left.append(call)
            return
        file.rewritten(use.node, use.api, "fully_shard, in place")
        report(file, translation)
