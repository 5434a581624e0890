"""A tiny decoder with odd sizes (uneven shards), tied weights, dropout, a buffer, and its data."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HIDDEN = 53, 30, 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = self.mix(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + causal.to(x.dtype)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.head.weight = self.emb.weight
        self.register_buffer("bias", torch.randn(VOCABULARY) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.bias


class Data:
    """Learnable sequences: the next token is mostly a fixed function of the last."""

    def __init__(self, seed: int) -> None:
        self.source = torch.Generator().manual_seed(seed)

    def batch(self) -> torch.Tensor:
        rows = [torch.randint(0, VOCABULARY, (4,), generator=self.source)]
        for _ in range(8):
            noise = torch.randint(0, 3, (4,), generator=self.source)
            rows.append((rows[-1] * 7 + 3 + noise) % VOCABULARY)
        return torch.stack(rows, 1)
