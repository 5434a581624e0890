"""FSDP2 that keeps gathered parameters from forward to backward: more memory, fewer gathers."""

from __future__ import annotations

from torch import nn

from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows.fsdp2 import shard


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    return shard(model, blocks, ranks, reshard_after_forward=False)


ROW = Row("fsdp2-no-reshard", "FSDP2, reshard_after_forward=False", parallelize)
