"""
Write the checkpoints that the benchmark converts: `make_source.py KIND FOLDER BYTES [RANKS]`.

The files of every rank are written by torch itself, one rank after the other in this one process
(torch's fake process group lets a process be any rank), of a Llama-like bfloat16 model filled with
random bytes, so that nothing on the way can profit from zeros.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


def shapes(nbytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """
    Names and shapes of a bfloat16 model of about `nbytes`. Larger ones are wider and a little
    deeper, as real ones are: 24 layers at 1 GB, 36 at 8 GB.
    """
    layers = max(round(24 * (nbytes / 1e9) ** 0.2), 2)
    vocabulary = 32_000 if nbytes >= 1 << 28 else 500
    # nbytes / 2 = layers * 10.75 * hidden ** 2 + 2 * vocabulary * hidden
    a, b = layers * 10.75, 2 * vocabulary
    hidden = max(int((-b + (b * b + 2 * a * nbytes) ** 0.5) / (2 * a)) // 32 * 32, 32)
    inner = hidden * 11 // 4
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (hidden // 4, hidden),
        "self_attn.v_proj.weight": (hidden // 4, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for number in range(layers):
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_()
    return words.view(torch.uint8)[:count].view(dtype).view(shape)


def sharded_tensor(shape: tuple[int, ...], rank: int, ranks: int) -> Any:
    """What FSDP1 saves under SHARDED_STATE_DICT by default."""
    return _create_chunk_sharded_tensor(random(shape), rank, ranks, 8, dist.group.WORLD)


def dtensor(shape: tuple[int, ...], rank: int, ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    rows = -(-shape[0] // ranks)
    local = random((max(min(rows, shape[0] - rank * rows), 0), *shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def rank_files(folder: Path, nbytes: int, ranks: int, make: Any) -> None:
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        model = {name: make(shape, rank, ranks) for name, shape in shapes(nbytes)}
        torch.save({"model": model}, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def local_files(folder: Path, nbytes: int, ranks: int) -> None:
    """
    LOCAL_STATE_DICT of a model wrapped by layer, and each rank's optimizer.state_dict(), together
    about `nbytes`; and the layout that names what is in the flat parameters.
    """
    units: dict[str, int] = {"": 0}
    parameters = []
    for name, shape in shapes(nbytes // 3):
        parts = name.split(".")
        unit = ".".join(parts[:3]) if parts[1] == "layers" else ""
        units[unit] = units.get(unit, 0) + torch.Size(shape).numel()
        parameters.append({"name": name, "shape": shape, "dtype": "bfloat16"})
    layout = {"format": "fsdp-migrate model layout", "version": 1, "parameters": parameters}
    (folder / "layout.json").write_text(json.dumps(layout))
    options = dict(torch.optim.AdamW([torch.zeros(1)]).param_groups[0], params=[*range(len(units))])
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        model, state = {}, {}
        for number, (unit, numel) in enumerate(units.items()):
            flat = f"{unit}._flat_param".removeprefix(".")
            model[flat] = sharded_tensor((numel,), rank, ranks)
            size = (-(-numel // ranks),)
            moments = {key: random(size) for key in ("exp_avg", "exp_avg_sq")}
            state[number] = {"step": torch.tensor(8.0), **moments}
        torch.save(model, folder / f"pytorch_model_fsdp_rank{rank}.bin")
        torch.save({"state": state, "param_groups": [options]}, folder / f"optim_rank{rank}.pt")
        dist.destroy_process_group()


KINDS = {"sharded-tensor": sharded_tensor, "dtensor": dtensor}


def main(kind: str, folder: str, nbytes: str, ranks: str = "4") -> None:
    Path(folder).mkdir(parents=True)
    torch.manual_seed(0)
    if kind == "local":
        local_files(Path(folder), int(nbytes), int(ranks))
    else:
        rank_files(Path(folder), int(nbytes), int(ranks), KINDS[kind])


if __name__ == "__main__":
    main(*itertools.islice(sys.argv, 1, None))
