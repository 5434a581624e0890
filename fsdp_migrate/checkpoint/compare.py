"""
`compare-ckpt`: are two checkpoints the same, whatever their formats?

By name, shape, dtype and value, reading both in small blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_migrate.checkpoint.execute import Progress
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.proof import digest, each
from fsdp_migrate.checkpoint.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """`kind`: only in A, only in B, shape, dtype, value or option."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """`compared` counts the tensors whose values were compared."""

    compared: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return not self.differences


def compare(a: Index, b: Index, progress: Progress = lambda _: None) -> Comparison:
    left, right = named_tensors(a), named_tensors(b)
    differences = list(_structure(left, right))
    structural = {difference.name for difference in differences}
    both = [name for name in left if name in right and name not in structural]
    unequal: dict[str, Difference] = {}

    def work(name: str, gatherer: Gatherer) -> None:
        one = digest(left[name], gatherer, left[name].dtype, progress)
        other = digest(right[name], gatherer, right[name].dtype, progress)
        if one != other:
            unequal[name] = Difference(name, "value", _where(left[name], right[name], gatherer))

    each(work, sorted(both, key=lambda name: -left[name].nbytes))
    differences += [unequal[name] for name in both if name in unequal]
    differences += _plain(a, b)
    return Comparison(len(both), tuple(differences))


def named_tensors(index: Index) -> dict[str, Tensor]:
    """Every tensor of model and optimizer under one name."""
    found = {f"model.{name}": tensor for name, tensor in index.model.items()}
    if index.optimizer is not None:
        for fqn, entries in index.optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    found[f"optim.{fqn}.{key}"] = value
    return found


def _structure(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Iterator[Difference]:
    for name, one in left.items():
        other = right.get(name)
        if other is None:
            yield Difference(name, "only in A", f"{one.dtype} {list(one.shape)}")
        elif one.shape != other.shape:
            yield Difference(name, "shape", f"{list(one.shape)} and {list(other.shape)}")
        elif one.dtype != other.dtype:
            yield Difference(name, "dtype", f"{one.dtype} and {other.dtype}")
    for name, other in right.items():
        if name not in left:
            yield Difference(name, "only in B", f"{other.dtype} {list(other.shape)}")


def _where(one: Tensor, other: Tensor, gatherer: Gatherer) -> str:
    """How many elements differ, and where the first one is."""
    import numpy as np

    size, first, count = one.type.bytes, -1, 0
    step = max((1 << 20) // size, 1)
    for start in range(0, one.numel, step):
        stop = min(start + step, one.numel)
        pair = [
            np.frombuffer(gatherer.read(tensor, start, stop), np.uint8).reshape(-1, size)
            for tensor in (one, other)
        ]
        unequal = (pair[0] != pair[1]).any(axis=1)
        if first < 0 and unequal.any():
            first = start + int(unequal.argmax())
        count += int(unequal.sum())
    index = [int(i) for i in np.unravel_index(first, one.shape)] if one.shape else []
    return f"{count} of {one.numel} elements differ, the first at {index}"


def _plain(a: Index, b: Index) -> Iterator[Difference]:
    """Optimizer values that are no tensors, and param groups by parameter."""
    left, right = a.optimizer, b.optimizer
    if left is None or right is None:
        return
    for fqn, entries in left.state.items():
        for key, value in entries.items():
            other = right.state.get(fqn, {}).get(key)
            if isinstance(value, Tensor) != isinstance(other, Tensor):
                yield Difference(f"optim.{fqn}.{key}", "value", "a tensor in one of them only")
            elif not isinstance(value, Tensor) and value != other:
                yield Difference(f"optim.{fqn}.{key}", "value", f"{value!r} and {other!r}")
    for fqn in (fqn for fqn in right.state if fqn not in left.state):
        yield Difference(f"optim.{fqn}", "only in B", "optimizer state")
    one = {name: group.options for group in left.groups for name in group.params}
    other_options = {name: group.options for group in right.groups for name in group.params}
    for name in dict.fromkeys((*one, *other_options)):
        mine, theirs = one.get(name), other_options.get(name)
        if mine is None or theirs is None:
            kind = "only in A" if theirs is None else "only in B"
            yield Difference(f"optim.{name}", kind, "listed in a param group")
            continue
        for key in dict.fromkeys((*mine, *theirs)):
            if key not in mine or key not in theirs or _unequal(mine[key], theirs[key]):
                detail = f"{mine.get(key, 'absent')!r} and {theirs.get(key, 'absent')!r}"
                yield Difference(f"optim.{name}", "option", f"{key}: {detail}")


def _unequal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return not (isinstance(one, Tensor) and isinstance(other, Tensor))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) != list(other)
    return one != other
