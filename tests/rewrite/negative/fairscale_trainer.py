"""fairscale's class has the same name and other arguments."""
import torch
from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn import auto_wrap, checkpoint_wrapper, default_auto_wrap_policy, enable_wrap, wrap
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.optim.grad_scaler import ShardedGradScaler


def build(model, group):
    with enable_wrap(wrapper_cls=FSDP, process_group=group, mixed_precision=True, flatten_parameters=True):
        model = auto_wrap(model, auto_wrap_policy=default_auto_wrap_policy)
        model.head = wrap(checkpoint_wrapper(model.head))
    model = FSDP(model, process_group=group, reshard_after_forward=False, mixed_precision=True)
    assert isinstance(model, FullyShardedDataParallel)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, ShardedGradScaler()


def step(model, optimizer, scaler, batch):
    with model.no_sync():
        scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)


def save(model, optimizer, path):
    with model.summon_full_params():
        print(sum(p.numel() for p in model.parameters()))
    state = {"model": model.state_dict(), "optimizer": model.gather_full_optim_state_dict(optimizer)}
    state["shards"] = FSDP.get_shard_from_optim_state_dict
    torch.save(state, path)
