"""
A model of the user's own: `MODULE:FUNCTION`, called without arguments, returns an `nn.Module`.

By default the model is called with token ids `[batch, seq]` and answers with a scalar loss, or
with logits `[batch, seq, vocab]` (then the loss is next-token cross entropy), or with an object
that has `.loss` or `.logits`. A model that eats something else has a method
`bench_batch(rows, seq_len, generator) -> tuple of tensors`, and is called with those.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp_migrate.errors import SourceError, UsageError
from fsdp_migrate.verify.bench.models import tokens


@dataclass(frozen=True, slots=True)
class Factory:
    entry: str
    vocab_size: int | None

    def check(self) -> None:
        self.function()

    def function(self) -> Callable[[], object]:
        module_name, colon, name = self.entry.partition(":")
        if not (colon and module_name and name):
            raise UsageError(f"--model {self.entry}: expected MODULE:FUNCTION")
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        try:
            found = getattr(importlib.import_module(module_name), name, None)
        except Exception as error:  # the user's module may raise anything while it is imported
            what = f"{type(error).__name__}: {error}"
            raise SourceError(f"--model {self.entry}: importing {module_name}: {what}") from error
        if not callable(found):
            raise SourceError(f"--model {self.entry}: {module_name} has no function {name}")
        function: Callable[[], object] = found
        return function

    def build(self) -> nn.Module:
        model = self.function()()
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise SourceError(f"--model {self.entry} returned a {kind}, expected an nn.Module")
        return model

    def batch(
        self, model: nn.Module, rows: int, seq_len: int, rng: torch.Generator
    ) -> tuple[Tensor, ...]:
        own = getattr(model, "bench_batch", None)
        if own is not None:
            return tuple(own(rows, seq_len, rng))
        return (tokens.draw(rows, seq_len, self._vocabulary(model), rng),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        answer = model(*batch)
        answer = getattr(answer, "loss", None) if hasattr(answer, "loss") else answer
        answer = getattr(answer, "logits", answer)
        if not isinstance(answer, Tensor):
            kind = type(answer).__name__
            raise SourceError(
                f"--model {self.entry}: its forward gave a {kind}, not a loss or logits"
            )
        if answer.numel() == 1:
            return answer.squeeze()
        if answer.dim() != 3:
            shape = list(answer.shape)
            raise SourceError(
                f"--model {self.entry}: its forward gave shape {shape}, "
                "expected a scalar loss or logits [batch, seq, vocab]"
            )
        logits, ids = answer[:, :-1].float(), batch[0][:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def _vocabulary(self, model: nn.Module) -> int:
        if self.vocab_size is not None:
            return self.vocab_size
        sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        if len(sizes) != 1:
            raise SourceError(
                f"--model {self.entry} has {len(sizes)} sizes of nn.Embedding, so its vocabulary "
                "is not known: pass --vocab-size, or give the model a bench_batch method"
            )
        return sizes.pop()
