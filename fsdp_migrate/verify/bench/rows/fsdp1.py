"""FullyShardedDataParallel, one unit a block: what the other rows are held against."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_migrate.verify.bench.row import Ranks, Row


def parallelize(model: nn.Module, blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    units = {id(block) for block in blocks}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
        mixed_precision=MixedPrecision(param_dtype=ranks.dtype, reduce_dtype=torch.float32),
        device_id=ranks.device,
        use_orig_params=True,  # parts can be frozen, as in FSDP2
    )


ROW = Row("fsdp1", "FSDP1", parallelize)
