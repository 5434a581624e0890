"""
Compare the copies of one shard that several ranks saved.

Equal replicas are stored once. A parameter whose replicas differ has no true value, so that is an
error; buffers such as BatchNorm's running mean do differ by rank, then rank 0's is taken, as FSDP's
own full state dict does, and the user is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import xxhash

from fsdp_migrate.checkpoint.contents import KeyPath, Replica, shown
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Role
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Incomplete

_BLOCK = 1 << 22  # bytes read at a time


def check(replicas: Iterable[Replica], roles: Mapping[KeyPath, Role]) -> list[str]:
    """
    The names of buffers whose replicas differ; raises `Incomplete` for any other tensor.

    Reads every replica once.
    """
    differing: dict[str, None] = {}
    kept: dict[int, bytes] = {}
    with Gatherer() as gatherer:
        for replica in replicas:
            known = kept.get(id(replica.kept))
            if known is None:
                known = kept[id(replica.kept)] = digest(replica.kept, gatherer)
            if known == digest(replica.other, gatherer):
                continue
            if roles.get(replica.path) != "buffer":
                raise Incomplete(
                    f"{shown(replica.path)}: its copies in {replica.kept.origin} and "
                    f"{replica.other.origin} differ, so no one can say which is right"
                )
            differing[shown(replica.path)] = None
    return list(differing)


def digest(tensor: Tensor, gatherer: Gatherer) -> bytes:
    """xxh3-128 of a tensor's elements in row-major order."""
    hasher = xxhash.xxh3_128()
    step = max(_BLOCK // tensor.type.bytes, 1)
    buffer = memoryview(bytearray(min(step, tensor.numel) * tensor.type.bytes))
    for start in range(0, tensor.numel, step):
        stop = min(start + step, tensor.numel)
        data = buffer[: (stop - start) * tensor.type.bytes]
        gatherer.read_into(tensor, start, stop, data)
        hasher.update(data)
    return hasher.digest()
