"""
Compare the copies of one shard that several ranks saved.

Equal replicas are stored once. A parameter whose replicas differ has no true value, so that is an
error; buffers such as BatchNorm's running mean do differ by rank, then rank 0's is taken, as FSDP's
own full state dict does, and the user is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdp_migrate.checkpoint.contents import KeyPath, Replica, shown
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Role
from fsdp_migrate.checkpoint.proof import digest
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Incomplete


def check(replicas: Iterable[Replica], roles: Mapping[KeyPath, Role]) -> list[str]:
    """
    The names of buffers whose replicas differ; raises `Incomplete` for any other tensor.

    Reads every replica once.
    """
    differing: dict[str, None] = {}
    kept: dict[int, str] = {}
    with Gatherer() as gatherer:
        for replica in replicas:
            known = kept.get(id(replica.kept))
            if known is None:
                known = kept[id(replica.kept)] = _digest(replica.kept, gatherer)
            if known == _digest(replica.other, gatherer):
                continue
            if roles.get(replica.path) != "buffer":
                raise Incomplete(
                    f"{shown(replica.path)}: its copies in {replica.kept.origin} and "
                    f"{replica.other.origin} differ, so no one can say which is right"
                )
            differing[shown(replica.path)] = None
    return list(differing)


def _digest(tensor: Tensor, gatherer: Gatherer) -> str:
    return digest(tensor, gatherer, tensor.dtype, lambda _: None)
