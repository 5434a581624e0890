"""FSDP2 with each block compiled before it is sharded, so that no graph holds a collective."""

from __future__ import annotations

from torch import nn

from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows.fsdp2 import shard


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    for block in blocks:
        block.compile()
    return shard(model, blocks, ranks)


ROW = Row("fsdp2-compile", "FSDP2 + torch.compile", parallelize, compiles=True)
