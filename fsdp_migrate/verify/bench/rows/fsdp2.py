"""fully_shard on each block and on the root: the migrated model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdp_migrate.verify.bench.row import Ranks, Row


def shard(
    model: nn.Module,
    blocks: tuple[nn.Module, ...],
    ranks: Ranks,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    offload: bool = False,
) -> nn.Module:
    """The blocks one by one, then what is left as the root's own unit."""
    on_gpu = ranks.device.type == "cuda"
    mesh = ranks.mesh((ranks.world_size,), ("shard",)) if mesh is None else mesh
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(ranks.dtype, torch.float32),
            offload_policy=policy,
        )
    return model


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    return shard(model, blocks, ranks)


ROW = Row("fsdp2", "FSDP2", parallelize)
