"""
An optimizer's own state_dict() that went through DCP: states by integer id, tensors whole.

`raw_optimizer` understands what one rank pickled. Each tensor is shown to it as a stand-in of the
same shape and dtype, and its answer led back to the tensor that the stand-in stood for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint import raw_optimizer
from fsdp_migrate.checkpoint.contents import Contents, KeyPath, RankTree
from fsdp_migrate.checkpoint.flat_layout import Read
from fsdp_migrate.checkpoint.index import Group, Optimizer
from fsdp_migrate.checkpoint.pickles import Stored
from fsdp_migrate.checkpoint.tensors import Tensor, row_major
from fsdp_migrate.errors import Incomplete


def name(contents: Contents, root: KeyPath, known: raw_optimizer.Known, read: Read) -> Optimizer:
    """The optimizer at `root` by FQN; errors as `raw_optimizer.name`."""
    stand_ins = _StandIns({})
    state: dict[Any, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for path, value in contents.values.items():
        if path[: len(root)] != root:
            continue
        match path[len(root) :]:
            case ("state", int() | str() as number, str() as key) if str(number).isdigit():
                state.setdefault(int(number), {})[key] = stand_ins.of(value)
            case ("param_groups",) if isinstance(value, list):
                groups.update(enumerate(value))
            case ("param_groups", int() as number, str() as key):
                groups.setdefault(number, {})[key] = stand_ins.of(value)
    tree = {"state": state, "param_groups": [groups[number] for number in sorted(groups)]}

    def through(tensor: Tensor, start: int, stop: int) -> bytes:
        return read(stand_ins.original(tensor), start, stop)

    named = raw_optimizer.name([RankTree(0, tree)], replace(known, group_size=1), through)
    return Optimizer(
        {
            fqn: {key: stand_ins.original(value, f"{fqn}.{key}") for key, value in entries.items()}
            for fqn, entries in named.optimizer.state.items()
        },
        tuple(
            Group(g.params, {key: stand_ins.original(v, key) for key, v in g.options.items()})
            for g in named.optimizer.groups
        ),
    )


@dataclass(frozen=True, slots=True)
class _StandIns:
    """Tensors by the path, which no file has, of what stands for them."""

    tensors: dict[Path, Tensor]

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        path = Path(f"\0{len(self.tensors)}")
        self.tensors[path] = value
        return Stored(value.dtype, value.shape, row_major(value.shape), path, 0, "0")

    def original(self, value: Any, name: str = "") -> Any:
        """The tensor that `value` stands for, whole, under `name`; other values as they are."""
        if not isinstance(value, Tensor):
            return value
        stores = {part.store for part in value.pieces}
        found = [self.tensors[store] for store in stores if store in self.tensors]
        if not found:
            return value
        if len(found) > 1 or found[0].shape != value.shape:
            raise Incomplete(f"{value.name}: its state is not whole in the checkpoint")
        return replace(found[0], name=name or value.name)


def is_numbered(values: Mapping[KeyPath, object], root: KeyPath) -> bool:
    """Whether the optimizer at `root` has integers for parameters (DCP turns keys to strings)."""
    depth = len(root)
    for path, value in values.items():
        if path[:depth] != root:
            continue
        match path[depth:]:
            case ("param_groups", int(), "params"):
                listed: Any = value
            case ("param_groups",) if isinstance(value, list) and value:
                listed = value[0].get("params") if isinstance(value[0], dict) else None
            case _:
                continue
        if isinstance(listed, list | tuple) and listed:
            return all(type(param) is int for param in listed)
    return False
