"""
One rank that wraps a tiny transformers Llama in FSDP1, trains it, and saves flat parameters.

    llama_ranks.py RANK WORLD STORE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.checkpoint.teardown import leave


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=51,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


def one(folder: Path, tied: bool, rank: int) -> None:
    torch.manual_seed(11)
    model = FullyShardedDataParallel(
        LlamaForCausalLM(config(tied)),
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(30).view(3, 10) % 51
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "tied" if tied else "untied"
    local, hf = folder / name / "checkpoint", folder / name / "config"
    local.mkdir(parents=True, exist_ok=True)
    kind = FullyShardedDataParallel.state_dict_type
    with kind(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        torch.save(model.state_dict(), local / f"pytorch_model_fsdp_rank{rank}.bin")
    with kind(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        full = model.state_dict()
    if rank == 0:
        # The same weights in a plain model, through FSDP's own full state dict.
        plain = LlamaForCausalLM(config(tied)).eval()
        plain.load_state_dict(full)
        with torch.no_grad():
            torch.save(plain(input_ids=tokens).logits, folder / name / "logits.pt")
        config(tied).save_pretrained(hf)


def main() -> None:
    rank, world, store, folder = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    for tied in (False, True):
        one(Path(folder), tied, int(rank))
    leave()


if __name__ == "__main__":
    main()
