"""What upstream libraries read out of each target: {"model": …, "optim": …} of plain tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard


def torch_file(path: Path) -> dict[str, Any]:
    """Through torch.load, which must not need to trust the file."""
    return torch.load(path, weights_only=True)


def hf(folder: Path) -> dict[str, Any]:
    """Through safetensors; the index, where there is one, must say the truth."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {"model": load_file(folder / "model.safetensors")}
    listed = json.loads(index.read_text())
    model: dict[str, torch.Tensor] = {}
    for file in sorted(set(listed["weight_map"].values())):
        held = load_file(folder / file)
        assert all(listed["weight_map"][name] == file for name in held)
        model |= held
    assert set(model) == set(listed["weight_map"])
    size = sum(value.numel() * value.element_size() for value in model.values())
    assert listed["metadata"]["total_size"] == size
    return {"model": model}


def dcp(folder: Path) -> dict[str, Any]:
    """Through torch's DCP without a process group, whole tensors."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return found


def fsdp2(folder: Path) -> dict[str, Any]:
    """Through torch.load of every rank's file; DTensors are put together by their placements."""
    ranks = len(list(folder.glob("model_world_size_*_rank_*.pt")))
    loaded: dict[str, list[Any]] = {}
    for kind in ("model", "optim"):
        files = [folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        if files[0].exists():
            loaded[kind] = [torch.load(file, weights_only=True) for file in files]
    return {kind: _joined(trees) for kind, trees in loaded.items()}


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, DTensor):
        return _whole(values)
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values]) for key in first}
    return first


def _whole(values: list[DTensor]) -> torch.Tensor:
    *outer, last = values[0].placements
    assert all(isinstance(placement, Replicate) for placement in outer)
    assert isinstance(last, Shard) and last.dim == 0
    locals_ = [value.to_local() for value in values]
    whole = torch.cat(locals_)[: values[0].shape[0]]
    assert whole.shape == values[0].shape
    return whole
