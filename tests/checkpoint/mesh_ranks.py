"""
One rank of a job that saves DTensors and ShardedTensors of every kind of placement.

    mesh_ranks.py RANK WORLD STORE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.checkpoint.teardown import leave
from tests.checkpoint.test_torch_files import tagged


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("count", torch.arange(3))


def placed(mesh) -> dict[str, torch.Tensor]:
    """Every pair of placements on a 2-D mesh, on a shape that no side divides."""
    torch.manual_seed(0)
    found = {}
    for one in (Replicate(), Shard(0), Shard(1), Shard(2)):
        for other in (Replicate(), Shard(0), Shard(1), Shard(-1)):
            value = torch.randn(5, 7, 3)
            found[f"{one}{other}"] = distribute_tensor(value, mesh, [one, other])
    return found


def fsdp_over_tp(mesh) -> nn.Module:
    """Its column-parallel weights get a `_StridedShard`."""
    torch.manual_seed(1)
    model = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def by_columns() -> nn.Module:
    """FSDP2 that shards the largest dimension, whichever it is."""
    torch.manual_seed(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(12, 4, bias=False))
    return fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: Shard(p.shape.index(max(p.shape))),
    )


def sharded(rank: int, world: int) -> ShardedTensor:
    """Rows of a ShardedTensor whose placements are those of GPUs."""
    torch.manual_seed(3)
    whole = torch.randn(9, 2)
    chunks = whole.chunk(world)
    shards = []
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard

    if rank < len(chunks):
        offset = rank * chunks[0].shape[0]
        shards = [LocalShard.from_tensor_and_offsets(chunks[rank].clone(), [offset, 0], rank)]
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.remote_device import _remote_device

    value = init_from_local_shards(shards, *whole.shape)
    for number, metadata in enumerate(value.metadata().shards_metadata):
        metadata.placement = _remote_device(f"rank:{number}/cuda:{number}")
    return value


def main() -> None:
    rank, world, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    trees = {
        "placed": placed(mesh),
        "strided": fsdp_over_tp(mesh).state_dict(),
        "columns": by_columns().state_dict(),
        "hsdp": fully_shard(Mlp(), mesh=mesh).state_dict(),
        "sharded": {"a": sharded(rank, world)},
    }
    for name, tree in trees.items():
        whole = {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in tree.items()
            if not isinstance(value, ShardedTensor)
        }
        (folder / name).mkdir(exist_ok=True)
        if name == "columns":
            # As from GPUs: storages, and the type of the device mesh.
            for value in tree.values():
                value.device_mesh._device_type = "cuda"
        with tagged(f"cuda:{rank}"):
            torch.save(tree, folder / name / f"model_world_size_{world}_rank_{rank}.pt")
        if rank == 0 and whole:
            torch.save(whole, folder / f"{name}-truth.pt")
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
