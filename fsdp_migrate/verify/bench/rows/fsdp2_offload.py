"""FSDP2 with parameters, gradients and optimizer state kept in host memory."""

from __future__ import annotations

from torch import nn

from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows.fsdp2 import shard


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    return shard(model, blocks, ranks, offload=True)


ROW = Row("fsdp2-offload", "FSDP2 + CPU offload", parallelize)
