"""A usual FSDP1 training script, written for GPUs: the baseline of the tests."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from model import Block, Data, Decoder


CONFIGS = (
    FullStateDictConfig(offload_to_cpu=True, rank0_only=False),
    FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--freeze", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = Decoder()
    if args.uneven:  # rank 0's values must reach everyone
        model.bias.add_(rank)
        model.norm.bias.data.add_(rank)
    if args.freeze:
        model.emb.requires_grad_(False)
    precision = None
    if args.bf16:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = None
    if args.strategy == "HYBRID_SHARD":
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        sharding_strategy=ShardingStrategy[args.strategy],
        mixed_precision=precision,
        device_mesh=mesh,
        device_id=torch.cuda.current_device(),
        use_orig_params=not args.flat,
        sync_module_states=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    if args.resume:
        saved = torch.load(args.resume)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *CONFIGS):
            model.load_state_dict(saved["model"])
            state = FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
        optimizer.load_state_dict(state)
        scheduler.load_state_dict(saved["scheduler"])
    data = Data(seed=1000 + rank)
    torch.manual_seed(100 + rank)
    for step in range(args.steps):
        for micro in range(args.accumulate):
            tokens = data.batch().cuda()
            last = micro == args.accumulate - 1
            with model.no_sync() if not last else torch.enable_grad():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                (loss / args.accumulate).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if args.save:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *CONFIGS):
            saved = {
                "model": model.state_dict(),
                "optimizer": FSDP.optim_state_dict(model, optimizer),
                "scheduler": scheduler.state_dict(),
            }
        if rank == 0:
            torch.save(saved, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
