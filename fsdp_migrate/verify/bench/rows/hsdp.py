"""FSDP2 on a mesh of two dimensions: sharded inside a group, replicated across two groups."""

from __future__ import annotations

from torch import nn

from fsdp_migrate.errors import Unsupported
from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows.fsdp2 import shard

REPLICAS = 2


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    group, rest = divmod(ranks.world_size, REPLICAS)
    if rest or group < 2:
        raise Unsupported(
            f"needs {REPLICAS} groups of 2 ranks or more: {ranks.world_size} ranks do not split so"
        )
    mesh = ranks.mesh((REPLICAS, group), ("replicate", "shard"))
    return shard(model, blocks, ranks, mesh=mesh)


ROW = Row("hsdp", "HSDP (FSDP2, 2-D mesh)", parallelize)
