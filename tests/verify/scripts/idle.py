"""FSDP without training: --backward leaves the optimizer out, --step leaves backward out."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("nccl")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
if "--fsdp2" in sys.argv:
    fully_shard(model)
else:
    model = FullyShardedDataParallel(model, device_id=torch.cuda.current_device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.randn(2, 8)).sum()
    if "--backward" in sys.argv:
        loss.backward()
    if "--step" in sys.argv:
        optimizer.step()
