from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.tree import walk


class GlobalSizes(Rule):
    """
    Sizes of a sharded model's parameters are global now: a factor of the world size is left over.

    Under FSDP1 `numel()` and `shape` were this rank's part, and code multiplied by the world
    size to get the whole. Such products are marked.
    """

    name = "global-sizes"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                total = world_size * sum(param.numel() for param in model.parameters())
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                # TODO(fsdp-migrate): global-sizes numel() is global under FSDP2: drop the factor
                total = world_size * sum(param.numel() for param in model.parameters())
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for product in file.tree.all(cst.BinaryOperation):
            if not isinstance(product.operator, cst.Multiply):
                continue
            sides = (product.left, product.right)
            scaled = any(_is_world(file.tree.code(side)) for side in sides)
            if scaled and any(self._counts(file, side) for side in sides) and file.open(product):
                file.todo(product, "numel()", "numel() is global under FSDP2: drop the factor")

    @staticmethod
    def _counts(file: File, side: cst.BaseExpression) -> bool:
        """Whether an expression counts the parameters of an FSDP model."""
        if ".numel()" not in file.tree.code(side):
            return False
        return any(
            isinstance(node, cst.Attribute)
            and node.attr.value in ("parameters", "named_parameters")
            and file.models.is_model(node.value)
            for node in walk(side)
        )


def _is_world(text: str) -> bool:
    return len(text) < 60 and any(word in text for word in ("world_size", "get_world", "num_gpus"))
