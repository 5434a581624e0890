"""
`compare-ckpt`: are two checkpoints the same, whatever their formats?

By name, shape, dtype and value, reading both in small blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdp_migrate.checkpoint.execute import Progress
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index, Optimizer
from fsdp_migrate.checkpoint.proof import digest, each, equal_options
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
    """Optimizer values that are no tensors, and the options of each parameter's group."""
    left, right = a.optimizer, b.optimizer
    if left is None or right is None:
        return
    for fqn in dict.fromkeys((*left.state, *right.state)):
        if fqn not in left.state or fqn not in right.state:
            kind = "only in B" if fqn in right.state else "only in A"
            yield Difference(f"optim.{fqn}", kind, "optimizer state")
            continue
        one, other = left.state[fqn], right.state[fqn]
        for key in dict.fromkeys((*one, *other)):
            mine, theirs = one.get(key, "absent"), other.get(key, "absent")
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                continue
            if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
                if key in one and key in other:
                    yield Difference(f"optim.{fqn}.{key}", "value", "a tensor in one of them only")
            elif mine != theirs:
                yield Difference(f"optim.{fqn}.{key}", "value", f"{mine!r} and {theirs!r}")
    yield from _options(left, right)


def _options(left: Optimizer, right: Optimizer) -> Iterator[Difference]:
    """One difference for all parameters that have it: a group's options are theirs alike."""
    one = {name: group.options for group in left.groups for name in group.params}
    other = {name: group.options for group in right.groups for name in group.params}
    found: dict[tuple[str, str], list[str]] = {}
    with Gatherer() as gatherer:
        for name in dict.fromkeys((*one, *other)):
            mine, theirs = one.get(name), other.get(name)
            if mine is None or theirs is None:
                kind = "only in A" if theirs is None else "only in B"
                found.setdefault((kind, "listed in a param group"), []).append(name)
                continue
            for key in dict.fromkeys((*mine, *theirs)):
                same = key in mine and key in theirs
                if not (same and equal_options(mine[key], theirs[key], gatherer)):
                    values = [_shown(options, key, gatherer) for options in (mine, theirs)]
                    detail = f"{key}: {values[0]} and {values[1]}"
                    found.setdefault(("option", detail), []).append(name)
    for (kind, detail), names in found.items():
        more = f" ({len(names) - 1} more parameters likewise)" if len(names) > 1 else ""
        yield Difference(f"optim.{names[0]}", kind, detail + more)


def _shown(options: Mapping[str, object], key: str, gatherer: Gatherer) -> str:
    value = options.get(key, "absent")
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} of bytes {gatherer.read(value).hex()[:32]}"
    return repr(value)
