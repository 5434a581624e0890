"""The name is imported from a package of the project, and from nowhere in torch."""
import contextlib

from mylib.parallel import FSDP, MixedPrecision, ShardingStrategy, StateDictType
from mylib.parallel.wrap import transformer_auto_wrap_policy
from .fsdp import FullyShardedDataParallel


def build(model):
    def fully_shard(m):
        return FSDP(m, sharding_strategy=ShardingStrategy.FULL_SHARD, mixed_precision=MixedPrecision())

    return fully_shard(model)


def accumulate(model, batches):
    for i, batch in enumerate(batches):
        ctx = model.no_sync() if i % 4 else contextlib.nullcontext()
        with ctx:
            model(batch).backward()


def save(model):
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()
