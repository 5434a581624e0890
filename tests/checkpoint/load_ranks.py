"""
One rank of a real FSDP2 job that loads what a writer wrote and compares it with the truth.

    load_ranks.py RANK WORLD STORE FOLDER CHECK...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817, as everyone calls it
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from tests.checkpoint.teardown import leave

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Nasty(nn.Module):
    """Rows that don't divide by 2 or 3, fewer rows than ranks, a tie, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.one = nn.Parameter(torch.zeros(1))
        self.tiny = nn.Parameter(torch.zeros(2, 5))
        self.conv = nn.Parameter(torch.zeros(5, 2, 3))
        self.block = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 6, bias=False))
        self.bn = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def build(mesh=None, *, lr: float = 1.0):
    torch.manual_seed(99)
    model = Nasty()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def compare(model, optimizer, folder: Path) -> None:
    """Every value bit for bit, every step on storage of its own, the options of the group."""
    truth = torch.load(folder / "truth.pt", weights_only=True)
    for name, value in model.state_dict().items():
        got = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(got, truth["model"][name]), name
    names = {id(value): name for name, value in model.named_parameters()}
    assert len(optimizer.state) == len(truth["optim"])
    steps = set()
    for parameter, state in optimizer.state.items():
        expected = truth["optim"][names[id(parameter)]]
        assert set(state) == set(expected)
        for key, value in state.items():
            got = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(got, expected[key]), (names[id(parameter)], key)
        steps.add(state["step"].data_ptr())
    assert len(steps) == len(optimizer.state), "steps share storage"
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.003 and group["betas"] == (0.9, 0.95)
    assert group.get("decoupled_weight_decay", True) is True


def check_plain(folder: Path, name: str) -> None:
    model, optimizer = build()
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=folder / name)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    compare(model, optimizer, folder)


def check_accelerate(folder: Path, name: str) -> None:
    model, optimizer = build()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder / name / "pytorch_model_fsdp_0")
    set_model_state_dict(model, state["model"])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / name / "optimizer_0")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    compare(model, optimizer, folder)


def check_torchtitan(folder: Path, name: str) -> None:
    model, optimizer = build()
    state = get_model_state_dict(model)
    state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.load(state, checkpoint_id=folder / name)
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=FLAT)
    set_model_state_dict(model, state)
    compare(model, optimizer, folder)


def check_fsdp2(folder: Path, name: str) -> None:
    """`NAME:SHAPE`: this rank's own files, on an equal mesh of FSDP2."""
    name, _, shape = name.partition(":")
    sides = tuple(map(int, shape.split("x"))) if shape else (dist.get_world_size(),)
    names = ("fsdp",) if len(sides) == 1 else ("ddp", "fsdp")
    model, optimizer = build(init_device_mesh("cpu", sides, mesh_dim_names=names))
    suffix = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    state = torch.load(folder / name / f"model_{suffix}", weights_only=True)
    expected = model.state_dict()
    for key, value in state.items():
        assert type(value) is type(expected[key]), key
        if isinstance(value, DTensor):
            assert value.placements == expected[key].placements
            assert value.device_mesh == expected[key].device_mesh
            assert value.to_local().shape == expected[key].to_local().shape
    model.load_state_dict(state)
    optimizer.load_state_dict(torch.load(folder / name / f"optim_{suffix}", weights_only=True))
    compare(model, optimizer, folder)
    # The loaded states must do as an optimizer's own: take part in a step, and be saved again.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {
        float(entry["step"]) + 1
        for entry in torch.load(folder / "truth.pt", weights_only=True)["optim"].values()
    }
    torch.save(optimizer.state_dict(), folder / f"again-{name}-{suffix}")


def check_fsdp1(folder: Path, name: str) -> None:
    """The way back: real FSDP1 takes a FULL_STATE_DICT file; its local pieces are put together."""
    model = FSDP(Nasty(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    content = torch.load(folder / name, weights_only=True)
    truth = torch.load(folder / "truth.pt", weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(content["model"])
        state = FSDP.optim_state_dict_to_load(model, optimizer, content["optim"])
        optimizer.load_state_dict(state)
        for key, value in model.state_dict().items():
            assert torch.equal(value, truth["model"][key]), key
    local = {
        key.removeprefix("_fsdp_wrapped_module."): dict(optimizer.state[value])
        for key, value in model.named_parameters()
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, local)
    for key, entries in truth["optim"].items():
        for what, value in entries.items():
            pieces = [rank[key][what].reshape(-1) for rank in ranks if what in rank[key]]
            got = pieces[0] if what == "step" else torch.cat(pieces)
            assert torch.equal(got, value.reshape(-1)), (key, what)


CHECKS = {
    "fsdp1": check_fsdp1,
    "fsdp2": check_fsdp2,
    "plain": check_plain,
    "accelerate": check_accelerate,
    "torchtitan": check_torchtitan,
}


def main() -> None:
    rank, world, store, folder, *checks = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    for check in checks:
        kind, _, name = check.partition("=")
        CHECKS[kind](Path(folder), name or kind)
    leave()


if __name__ == "__main__":
    main()
