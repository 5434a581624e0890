"""
Where the benched model comes from. One module a kind of source.

A `Model` builds the same weights on every rank from the seed, makes batches of data that can be
learned a little (so that the loss moves, and an optimizer that does nothing would show), and turns
one batch into a scalar loss.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsdp_migrate.verify.bench.models.factory import Factory
from fsdp_migrate.verify.bench.models.huggingface import HuggingFace
from fsdp_migrate.verify.bench.setup import Setup


class Model(Protocol):
    def check(self) -> None:
        """Raise, before any rank is started, what would make every row fail."""

    def build(self) -> nn.Module:
        """The whole model, on the CPU, from torch's default generator."""

    def batch(self, model: nn.Module, rows: int, seq_len: int, rng: torch.Generator) -> Any:
        """`rows` examples as a tuple of tensors on the CPU, first dimension `rows`."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss over the batch: a scalar that can be differentiated."""


def model_of(setup: Setup) -> Model:
    if setup.hf_config is not None:
        return HuggingFace(setup.hf_config)
    assert setup.factory is not None
    return Factory(setup.factory, setup.vocab_size)
