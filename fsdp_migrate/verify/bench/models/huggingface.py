"""A causal language model of transformers, with random weights, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_migrate.errors import SourceError, UsageError
from fsdp_migrate.verify.bench.models import tokens


@dataclass(frozen=True, slots=True)
class HuggingFace:
    folder: Path

    def check(self) -> None:
        self.config()

    def config(self) -> Any:
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise UsageError(
                "--hf-config needs transformers: pip install 'fsdp-migrate[hf]'"
            ) from error
        file = self.folder if self.folder.is_file() else self.folder / "config.json"
        if not file.is_file():
            raise SourceError(f"--hf-config {self.folder}: no config.json there")
        try:
            return AutoConfig.from_pretrained(file.parent, local_files_only=True)
        except (ValueError, OSError, KeyError) as error:
            raise SourceError(f"{file}: transformers cannot read it: {error}") from error

    def build(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(self.config())  # type: ignore[no-untyped-call]
        return model

    def batch(
        self, model: nn.Module, rows: int, seq_len: int, rng: torch.Generator
    ) -> tuple[Tensor, ...]:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        return (tokens.draw(rows, seq_len, embedding.num_embeddings, rng),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (ids,) = batch
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
