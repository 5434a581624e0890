import smdistributed.modelparallel.torch as smp
import torch.sagemaker as tsm
from smdistributed.modelparallel.torch.nn import FullyShardedDataParallel as FSDP
from torch.sagemaker.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.sagemaker.delayed_param import DelayedParamIniter


def build(model, args):
    tsm.init()
    delayed = DelayedParamIniter(model)
    model = FullyShardedDataParallel(
        model,
        param_init_fn=delayed.get_param_init_fn(),
        post_param_init_fn=delayed.get_post_param_init_fn(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=MixedPrecision(param_dtype=args.dtype, buffer_dtype=args.dtype),
        limit_all_gathers=True,
    )
    optimizer = smp.DistributedOptimizer(args.optimizer)
    model.clip_grad_norm_(args.grad_clip)
    with model.no_sync():
        FSDP.optim_state_dict(model, optimizer)
    return model, optimizer
