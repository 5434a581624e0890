"""A Hugging Face Trainer script; VERSION is all that a migration changes."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VERSION = 1


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * 7 + index * 3) % 61
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    arguments = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=4,
        max_steps=8,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        bf16="--bf16" in sys.argv,
        report_to=[],
        save_strategy="no",
        fsdp=True,
        fsdp_config={
            "version": VERSION,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": "full_shard" if VERSION == 1 else True,
        },
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
