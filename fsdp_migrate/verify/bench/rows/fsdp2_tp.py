"""FSDP2 over the data-parallel dimension of a 2-D mesh, tensor parallelism of 2 over the other."""

from __future__ import annotations

from torch import nn

from fsdp_migrate.errors import Unsupported
from fsdp_migrate.verify.bench import tensor_parallel
from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows.fsdp2 import shard

PARTS = 2


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    if ranks.world_size % PARTS:
        raise Unsupported(f"{ranks.world_size} ranks are not divisible by TP={PARTS}")
    mesh = ranks.mesh((ranks.world_size // PARTS, PARTS), ("shard", "tensor"))
    # Each parameter goes to its device when it is cut: the whole model never has to fit one.
    tensor_parallel.cut(model, blocks, mesh["tensor"])
    return shard(model, blocks, ranks, mesh=mesh["shard"])


ROW = Row("fsdp2-tp", f"FSDP2 + TP={PARTS}", parallelize, sharing=PARTS)
