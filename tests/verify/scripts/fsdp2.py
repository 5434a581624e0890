"""The FSDP1 script, moved to FSDP2 by hand and correctly; the planted bugs are variants of it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import Block, Data, Decoder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resume")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = Decoder()
    if args.uneven:  # rank 0's values must reach everyone
        model.bias.add_(rank)
        model.norm.bias.data.add_(rank)
    if args.freeze:
        model.emb.requires_grad_(False)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)
    kwargs = {}
    if args.bf16:
        kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
        )
    if args.strategy == "SHARD_GRAD_OP":
        kwargs["reshard_after_forward"] = False
    if args.strategy == "NO_SHARD":
        kwargs["mesh"] = init_device_mesh("cuda", (world, 1), mesh_dim_names=("replicate", "shard"))
    if args.strategy == "HYBRID_SHARD":
        kwargs["mesh"] = init_device_mesh(
            "cuda", (world // 2, 2), mesh_dim_names=("replicate", "shard")
        )
    for module in reversed(list(model.modules())):
        if isinstance(module, Block):
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    if args.resume:
        saved = torch.load(args.resume)
        for state in saved["optimizer"]["state"].values():
            state["step"] = state["step"].clone()
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, saved["model"], options=options)
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        scheduler.load_state_dict(saved["scheduler"])
    data = Data(seed=1000 + rank)
    torch.manual_seed(100 + rank)
    for step in range(args.steps):
        for micro in range(args.accumulate):
            tokens = data.batch().cuda()
            model.set_requires_gradient_sync(micro == args.accumulate - 1)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
