"""Models for bench's `--model`, some of which go wrong in one row and in no other."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Tiny(nn.Module):
    """Embedding, two blocks, head: logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 61)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Troubled(Tiny):
    """Runs out of memory unsharded, crashes under FSDP2, is killed under FSDP2 half frozen."""

    def bench_batch(self, rows: int, seq_len: int, rng: torch.Generator) -> tuple[Tensor]:
        whole = sum(p.numel() for p in Tiny().parameters())
        sharded = isinstance(self.head.weight, DTensor)
        frozen = not self.embedding.weight.requires_grad
        if not sharded and sum(p.numel() for p in self.parameters()) == whole:
            torch.empty(2**60, dtype=torch.uint8)
        if os.environ["RANK"] == "1" and sharded:
            if frozen:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the dog ate rank 1")
        return (torch.randint(61, (rows, seq_len), generator=rng),)


class Hanging(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(3600)
        return super().forward(ids)


class Regression(nn.Module):
    """Eats no tokens: brings its own batches and its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def bench_batch(self, rows: int, seq_len: int, rng: torch.Generator) -> tuple[Tensor, ...]:
        inputs = torch.randn(rows, seq_len, 8, generator=rng)
        return inputs, inputs.cumsum(1)

    def forward(self, inputs: Tensor, wanted: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs - wanted).square().mean()
