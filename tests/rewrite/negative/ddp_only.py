"""DistributedDataParallel's methods have the same names."""
import contextlib
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.cuda.amp import GradScaler


def train(model, loader, accumulate):
    model = DistributedDataParallel(model, device_ids=[0])
    ema = deepcopy(model.module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    scaler = GradScaler()
    for i, batch in enumerate(loader):
        ctx = model.no_sync if i % accumulate else contextlib.nullcontext
        with ctx():
            scaler.scale(model(batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank() == 0:
        state = {k.replace("module.", ""): v for k, v in model.state_dict().items()}
        torch.save({"model": state, "ema": ema.state_dict(), "strategy": "FULL_SHARD"}, "out.pt")
