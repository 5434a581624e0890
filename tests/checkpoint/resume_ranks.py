"""
One rank of a run that is moved from FSDP1 to FSDP2 in the middle.

    resume_ranks.py RANK WORLD STORE FOLDER fsdp1        train 8 steps, save in every way, 8 more
    resume_ranks.py RANK WORLD STORE FOLDER fsdp2 NAME…  load each converted checkpoint, 8 steps
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.checkpoint.teardown import leave

STEPS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 13)
        self.down = nn.Linear(13, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that two ranks do not divide, a scalar-like parameter, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(10, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def build() -> Net:
    torch.manual_seed(5)
    return Net()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Iterator[str]:
    """Each step's loss on this rank, every bit of it."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        tokens = torch.randint(0, 17, (4, 6), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item().hex()


def save(model, optimizer, folder: Path, orig: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    name = "orig" if orig else "flat"

    def made(kind: str) -> Path:
        path = folder / f"{name}-{kind}"
        path.mkdir(exist_ok=True)
        return path

    kind = FullyShardedDataParallel.state_dict_type
    with kind(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        full = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
        if rank == 0:
            torch.save(full, made("full") / "checkpoint.pt")
    with kind(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        state = model.state_dict()
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        torch.save(state, made("ranks") / f"model_world_size_{world}_rank_{rank}.pt")
        torch.save(states, made("ranks") / f"optim_world_size_{world}_rank_{rank}.pt")
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=made("dcp"))
    with kind(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        torch.save(model.state_dict(), made("local") / f"model_rank{rank}.pt")
        torch.save(optimizer.state_dict(), made("local") / f"optim_rank{rank}.pt")


def fsdp1(folder: Path) -> None:
    losses = {}
    for orig in (False, True):
        model = FullyShardedDataParallel(
            build(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=orig,
            device_id=torch.device("cpu"),
        )
        optimizer = optimizer_of(model)
        list(train(model, optimizer, range(STEPS)))
        save(model, optimizer, folder, orig)
        losses["orig" if orig else "flat"] = list(train(model, optimizer, range(STEPS, 2 * STEPS)))
    (folder / f"fsdp1-{dist.get_rank()}.json").write_text(json.dumps(losses))


def fsdp2(folder: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    losses = {}
    for name in names:
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)  # whatever is not loaded shows
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = optimizer_of(model)
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state}
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        losses[name] = list(train(model, optimizer, range(STEPS, 2 * STEPS)))
    (folder / f"fsdp2-{dist.get_rank()}.json").write_text(json.dumps(losses))


def copying_cpu(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    """
    `Tensor.cpu` as on a GPU, where it copies. On a CPU it does not, and FSDP1's full optimizer
    state (use_orig_params=True) would alias one gather buffer: exp_avg would be exp_avg_sq.
    """
    return tensor.detach().to("cpu", copy=True)


def main() -> None:
    rank, world, store, folder, kind, *names = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    if kind == "fsdp1":
        torch.Tensor.cpu = copying_cpu
        fsdp1(Path(folder))
    else:
        fsdp2(Path(folder), names)
    leave()


if __name__ == "__main__":
    main()
