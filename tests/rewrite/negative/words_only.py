"""FullyShardedDataParallel, FSDP and ShardingStrategy.NO_SHARD in words: no code of torch's.

>>> from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # doctest: +SKIP
>>> model = FSDP(model)  # doctest: +SKIP
"""
# model = FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD)
HELP = "wrap the model with torch.distributed.fsdp.FullyShardedDataParallel(model)"
CHOICES = {"fsdp": "FULL_SHARD", "ddp": "NO_SHARD", "hsdp": "HYBRID_SHARD"}


def main(args):
    if args.parallel == "fsdp":
        raise NotImplementedError("FSDP is not available: " + HELP)
    return CHOICES[args.parallel]
