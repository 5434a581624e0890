"""DistributedDataParallel: every rank holds the whole model, gradients are averaged."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_migrate.verify.bench.row import Ranks, Row


class Autocast(nn.Module):
    """DDP's public interface has no mixed precision of its own: autocast is what people use."""

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.device_type, self.dtype = model, device.type, dtype

    def forward(self, *args: object, **kwargs: object) -> object:
        with torch.autocast(self.device_type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(*args, **kwargs)


def parallelize(model: nn.Module, _blocks: tuple[nn.Module, ...], ranks: Ranks) -> nn.Module:
    on_gpu = ranks.device.type == "cuda"
    model = model.to(ranks.device)
    wrapped = DistributedDataParallel(model, device_ids=[ranks.device] if on_gpu else None)
    return Autocast(wrapped, ranks.device, ranks.dtype)


ROW = Row("ddp", "DDP", parallelize)
