"""
What every writer's output is tested against: a small checkpoint whose values are known, stored as
badly as FSDP1 stores (runs that are cut anywhere, spread over files), and processes that load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import strategies as st

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.execute import execute
from fsdp_migrate.checkpoint.index import Group, Index, Optimizer
from fsdp_migrate.checkpoint.plan import Plan
from fsdp_migrate.checkpoint.tensors import Extent, Tensor
from tests.checkpoint.load_ranks import Nasty

ADAMW_2_6 = {
    "lr": 0.003,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
TIMEOUT = 180  # seconds; ranks are slow to start on a busy machine


def store(folder: Path, name: str, value: torch.Tensor, cuts: int = 3) -> Tensor:
    """`value` in up to `cuts` files, each run at an odd place after some junk."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    size, numel = value.element_size(), value.numel()
    step = max(-(-numel // cuts), 1)
    extents = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, numel, step)):
        stop = min(start + step, numel)
        path = folder / f"{name}.{number}"
        path.write_bytes(b"junk" * size + data[start * size : stop * size] + b"junk")
        extents.append(Extent(start, stop, path, 4 * size))
    dtype = str(value.dtype).removeprefix("torch.")
    return Tensor(name, dtype, tuple(value.shape), tuple(extents))


def truth(seed: int = 0) -> dict[str, dict]:
    """Random values for every tensor of Nasty and of an AdamW over it; each `step` its own."""
    torch.manual_seed(seed)
    model = {
        name: torch.randn(value.shape) if value.is_floating_point() else torch.full_like(value, 5)
        for name, value in Nasty().state_dict().items()
    }
    model["head.weight"] = model["embed.weight"]
    optim = {
        name: {
            "step": torch.tensor(float(3 + number)),
            "exp_avg": torch.randn(value.shape),
            "exp_avg_sq": torch.rand(value.shape),
        }
        for number, (name, value) in enumerate(Nasty().named_parameters())
    }
    return {"model": model, "optim": optim}


def index_of(folder: Path, values: dict[str, dict]) -> Index:
    parameters = dict(Nasty().named_parameters(remove_duplicate=False))
    model = {name: store(folder, name, value) for name, value in values["model"].items()}
    model["head.weight"] = model["embed.weight"]
    state = {
        name: {key: store(folder, f"{name}:{key}", value) for key, value in entries.items()}
        for name, entries in values["optim"].items()
    }
    group = Group(tuple(values["optim"]), ADAMW_2_6)
    roles = {name: "parameter" if name in parameters else "buffer" for name in model}
    return Index(model, Optimizer(state, (group,)), roles)


def example(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if name == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
NAMES = st.sampled_from([name for name in DTYPES if hasattr(torch, name)])


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write(plan: Plan, output: Path) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    execute(plan, output)
    return output


def run_ranks(world: int, folder: Path, *checks: str) -> None:
    """Run `checks` of load_ranks.py in `world` processes; fails with what the ranks printed."""
    script = Path(__file__).with_name("load_ranks.py")
    root = script.parents[2]
    store_file = folder / f"store-{world}-{'-'.join(checks)}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), str(store_file), str(folder), *checks],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [f"rank {n}:\n{text}" for n, text in enumerate(outputs) if ranks[n].returncode]
    assert not failed, "\n".join(failed)
