"""Token ids with uneven frequencies: there is something to learn, so a loss that moves is proof."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(rows: int, seq_len: int, vocab_size: int, rng: torch.Generator) -> Tensor:
    """`[rows, seq_len]` int64; low ids are drawn more often (density falls as 1/sqrt)."""
    uniform = torch.rand(rows, seq_len, generator=rng, dtype=torch.float64)
    return (uniform.square() * vocab_size).long()
