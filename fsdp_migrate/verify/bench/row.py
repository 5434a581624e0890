"""One row of the table: a way to spread a model over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place, and what a row needs to know to spread a model."""

    device: torch.device
    rank: int
    world_size: int
    dtype: torch.dtype  # of the computation; weights and reductions are fp32

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


Parallelize = Callable[[nn.Module, tuple[nn.Module, ...], Ranks], nn.Module]


@dataclass(frozen=True, slots=True)
class Row:
    """
    `parallelize(model, blocks, ranks)` spreads a whole CPU model and returns what is trained; it
    raises `Unsupported`, with the reason, where this row cannot run.

    `reference` is the row its speed and losses are held against; `freezes` says that the first
    half of the model is frozen; `sharing` is how many ranks work on the same data.
    """

    name: str
    title: str
    parallelize: Parallelize
    reference: str = "fsdp1"
    freezes: bool = False
    sharing: int = 1
    compiles: bool = False
