from __future__ import annotations

import re

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.tree import walk

_REDUCE = frozenset({"norm", "sum", "mean", "max", "min", "std", "var", "item", "tolist", "any"})
_ONE_RANK = re.compile(
    r"rank\w*(\(\))?\s*==\s*0|is_(main|master|rank_?zero|local_main)\w*|not\s+rank"
)
Loop = cst.For | cst.CompFor


class ParameterReads(Rule):
    """
    Reading a sharded parameter is a collective now, and its norm is already global.

    Under FSDP1 parameters and gradients were this rank's plain shards. On DTensors a reduction
    such as `p.norm().item()` talks to all ranks: under a rank guard it hangs, and a norm that is
    then reduced by hand is counted twice. Both are marked.
    """

    name = "parameter-reads"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                if rank == 0:
                    for name, param in model.named_parameters():
                        print(name, param.norm().item())
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                if rank == 0:
                    # TODO(fsdp-migrate): parameter-reads a collective: run it on all ranks
                    for name, param in model.named_parameters():
                        print(name, param.norm().item())
            """,
        ),
    )

    def decide(self, file: File) -> None:
        loops: list[Loop] = [*file.tree.all(cst.For), *file.tree.all(cst.CompFor)]
        for loop in loops:
            if not _over_parameters(file, loop) or not file.open(loop):
                continue
            body = loop.body if isinstance(loop, cst.For) else file.tree.parent(loop)
            if body is None or not _reduces(body):
                continue
            what = "parameters()"
            if _on_one_rank(file, loop):
                file.todo(loop, what, "a collective: run it on all ranks")
            elif _reduced_by_hand(file, loop, body):
                message = "norms of DTensors are global: drop the all_reduce, take full_tensor()"
                file.todo(loop, what, message)


def _over_parameters(file: File, loop: Loop) -> bool:
    return any(
        isinstance(node, cst.Attribute)
        and node.attr.value in ("parameters", "named_parameters")
        and file.models.is_model(node.value)
        for node in walk(loop.iter)
    )


def _reduces(body: cst.CSTNode) -> bool:
    return any(
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in _REDUCE
        for node in walk(body)
    )


def _on_one_rank(file: File, loop: cst.CSTNode) -> bool:
    below = loop
    for above in file.tree.ancestors(loop):
        if isinstance(above, cst.FunctionDef):
            return False
        asked = above.test if isinstance(above, cst.If) and below is above.body else None
        if asked is not None and _ONE_RANK.search(file.tree.code(asked)):
            return True
        below = above
    return False


def _reduced_by_hand(file: File, loop: cst.CSTNode, body: cst.CSTNode) -> bool:
    """Whether gradient norms are gathered in the loop and all_reduce follows in its function."""
    texts = {node.attr.value for node in walk(body) if isinstance(node, cst.Attribute)}
    if "grad" not in texts or "norm" not in texts:
        return False
    scope = file.tree.function(loop) or file.tree.module
    return any(
        isinstance(node, cst.Call) and file.qualified(node.func) == "torch.distributed.all_reduce"
        for node in walk(scope)
    )
