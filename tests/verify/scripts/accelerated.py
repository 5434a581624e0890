"""An accelerate script; FSDP_VERSION=1 or 2 is all that a migration changes."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed

from model import Data, Decoder

VERSION = 1


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=VERSION,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward="FULL_SHARD" if VERSION == 1 else True,
        cpu_ram_efficient_loading=False,
        **({"use_orig_params": True} if VERSION == 1 else {}),
    )
    accelerator = Accelerator(
        mixed_precision="bf16" if "--bf16" in sys.argv else "no",
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin,
    )
    set_seed(3)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = Data(seed=accelerator.process_index)
    for _ in range(40):
        with accelerator.accumulate(model):
            tokens = data.batch().to(accelerator.device)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
