from __future__ import annotations

from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.units import PolicyReader
from fsdp_migrate.rewrite.wrap import Argument, Translation


class AutoWrapPolicy(ArgumentRule):
    """
    `auto_wrap_policy` becomes explicit `fully_shard` calls on the same set of submodules.

    Class and lambda policies (also joined by `_or_policy`, in a variable, or returned by a small
    function) become a loop with a readable condition, children before parents. Size-based and
    hand-written policies keep their unit set through a helper that walks the model as FSDP1 did.
    """

    name = "auto-wrap-policy"
    arguments = ("auto_wrap_policy",)
    examples = (
        Example(
            before="""
                import functools
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

                policy = functools.partial(
                    transformer_auto_wrap_policy, transformer_layer_cls={Block, Head}
                )
                model = FSDP(model, auto_wrap_policy=policy)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                for module in reversed(list(model.modules())):
                    if module is not model and isinstance(module, (Block, Head)):
                        fully_shard(module)
                fully_shard(model)
            """,
        ),
        Example(
            before="""
                import functools
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

                model = FSDP(
                    model,
                    auto_wrap_policy=functools.partial(
                        lambda_auto_wrap_policy, lambda_fn=lambda m: m in list(model.layers)
                    ),
                )
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                for module in reversed(list(model.modules())):
                    if module is not model and module in list(model.layers):
                        fully_shard(module)
                fully_shard(model)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        units = PolicyReader(into.file).read(argument.value)
        into.units = units
        if units is None:
            return "rewritten", "no policy: the whole model is one unit"
        if units.predicate is None:
            return "rewritten", "the policy picks the same units through a helper"
        into.file.cover_below(argument.value)
        return "rewritten", "a loop over the same units, children before parents"
