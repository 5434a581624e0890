"""
What a user would run instead of convert-ckpt: `alternatives.py KIND SOURCE OUTPUT`.

    concatenate   load every rank's file, concatenate the shards, save safetensors
    dcp           torch.distributed.checkpoint.format_utils.dcp_to_torch_save
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def local(value: Any) -> torch.Tensor:
    """This rank's part of a ShardedTensor or DTensor; ranks that own nothing have no shard."""
    if hasattr(value, "_local_tensor"):
        return value._local_tensor
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0, *value.size()[1:], dtype=value.dtype)


def concatenate(source: Path, output: Path) -> None:
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parts = []
    files = sorted(source.iterdir())
    for rank, file in enumerate(files):
        # A ShardedTensor unpickles only on the rank that wrote it.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(files))
        parts.append(torch.load(file, weights_only=False)["model"])
        dist.destroy_process_group()
    whole = {name: torch.cat([local(part[name]) for part in parts]) for name in parts[0]}
    output.mkdir()
    save_file(whole, output / "model.safetensors", metadata={"format": "pt"})


def dcp(source: Path, output: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, output)


if __name__ == "__main__":
    kind, source, output = sys.argv[1:]
    {"concatenate": concatenate, "dcp": dcp}[kind](Path(source), Path(output))
