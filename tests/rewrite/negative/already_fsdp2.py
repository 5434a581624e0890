"""FSDP2 through and through."""
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def build(model, block_cls, world):
    mesh = init_device_mesh("cuda", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in reversed(list(model.modules())):
        if isinstance(module, block_cls):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(model, batch, last):
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model(batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor().item()


def save(model, rank):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "out.pt")
