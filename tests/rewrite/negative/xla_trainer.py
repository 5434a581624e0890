import functools

import torch_xla.core.xla_model as xm
import torch_xla.distributed.fsdp as xla_fsdp
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP, checkpoint_module
from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints
from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel as FSDPv2


def build(model, block_cls, spmd):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block_cls})
    if spmd:
        return FSDPv2(model, auto_wrap_policy=policy)
    if block_cls is None:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
    wrapped = FSDP(
        model,
        auto_wrap_policy=policy,
        auto_wrapper_callable=lambda m, *a, **k: FSDP(checkpoint_module(m), *a, **k),
        compute_dtype=None,
        buffer_dtype=None,
    )
    assert isinstance(wrapped, xla_fsdp.XlaFullyShardedDataParallel)
    return wrapped


def finish(model, optimizer):
    model.clip_grad_norm_(1.0)
    optimizer.step()
    xm.save({"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}, "out.pth")
    consolidate_sharded_model_checkpoints("out", "*.pth")
