"""
Tensors put together again from what each rank recorded of its part.

Parts with equal extents are replicas: one of them counts. Everything here is arithmetic on a Trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_migrate.verify.trial import Final, Part, Trace


@dataclass(frozen=True)
class Whole:
    """A whole tensor as numbers: equal `bits` mean equal elements."""

    numel: int
    bits: int
    norm: float
    sketch: tuple[float, ...]
    split: tuple[int, int] | None  # two ranks whose replicas of one extent differ

    def distance(self, other: Whole) -> float:
        """||self - other|| / ||self||, estimated from the sketches."""
        if self.bits == other.bits:
            return 0.0
        gaps = [(a - b) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True)]
        apart = math.sqrt(sum(gaps) / len(gaps)) if gaps else math.inf
        return apart / self.norm if self.norm else math.inf


def join(parts: Iterable[tuple[int, Part]]) -> Whole:
    """The whole of (rank, part) pairs."""
    first: dict[str, tuple[int, Part]] = {}
    split = None
    for rank, part in parts:
        known = first.setdefault(part.extent, (rank, part))
        if known[1].bits != part.bits:
            split = split or (known[0], rank)
    unique = [part for _, part in first.values()]
    width = max((len(part.sketch) for part in unique), default=0)
    return Whole(
        numel=sum(part.numel for part in unique),
        bits=sum(part.bits for part in unique) % 2**64,
        norm=math.sqrt(sum(part.squares for part in unique)),
        sketch=tuple(sum(p.sketch[i] for p in unique if p.sketch) for i in range(width)),
        split=split,
    )


def start_params(trace: Trace) -> dict[str, Whole]:
    """Initial parameters by name."""
    parts: dict[str, list[tuple[int, Part]]] = {}
    for rank in trace.ranks:
        for name, param in rank.model.params.items() if rank.model else ():
            parts.setdefault(name, []).extend([(rank.rank, param.part)] if param.part else [])
    return {name: join(found) for name, found in parts.items()}


def final_params(trace: Trace) -> dict[str, Whole]:
    """Parameters after the last step, by name."""
    parts: dict[str, list[tuple[int, Part]]] = {}
    for rank in trace.ranks:
        for name, part in rank.final.params.items() if rank.final else ():
            parts.setdefault(name, []).append((rank.rank, part))
    return {name: join(found) for name, found in parts.items()}


State = dict[tuple[str, str], Whole | frozenset[object]]


def join_state(states: Iterable[tuple[int, Mapping[str, Mapping[str, object]]]]) -> State:
    """Optimizer state by (parameter, key): a Whole, or the set of values that ranks hold."""
    parts: dict[tuple[str, str], list[tuple[int, Part]]] = {}
    values: dict[tuple[str, str], set[object]] = {}
    for rank, state in states:
        for name, entry in state.items():
            for key, value in entry.items():
                if isinstance(value, Part):
                    parts.setdefault((name, key), []).append((rank, value))
                else:
                    values.setdefault((name, key), set()).add(value)
    joined: State = {where: join(found) for where, found in parts.items()}
    joined.update({where: frozenset(found) for where, found in values.items()})
    return joined


def start_state(trace: Trace, index: int) -> State:
    """State of optimizer `index` before its first step."""
    return join_state(
        (rank.rank, rank.optimizers[index].state)
        for rank in trace.ranks
        if len(rank.optimizers) > index
    )


def final_state(trace: Trace, index: int) -> State:
    finals: list[tuple[int, Final]] = [(r.rank, r.final) for r in trace.ranks if r.final]
    return join_state((rank, f.state[index]) for rank, f in finals if len(f.state) > index)


@dataclass(frozen=True)
class Gradient:
    """The global norm of one parameter's gradient; None: no rank has one."""

    norm: float | None
    split: tuple[int, int] | None  # two ranks whose replicas differ


def gradients(trace: Trace, step: int, which: str) -> dict[str, Gradient]:
    """Gradients by name at `step`; `which` is raw (after backward) or final (at the optimizer)."""
    squares: dict[str, dict[str, tuple[int, float]]] = {}
    missing: dict[str, bool] = {}
    split: dict[str, tuple[int, int]] = {}
    for rank in trace.ranks:
        for name, value in getattr(rank.steps[step], which).items():
            missing.setdefault(name, True)
            if value is None or rank.model is None or name not in rank.model.params:
                continue
            missing[name] = False
            extent = rank.model.params[name].extent
            first = squares.setdefault(name, {}).setdefault(extent, (rank.rank, value))
            if first[1] != value and not (math.isnan(first[1]) and math.isnan(value)):
                split.setdefault(name, (first[0], rank.rank))
    return {
        name: Gradient(
            None if gone else math.sqrt(sum(v for _, v in squares[name].values())), split.get(name)
        )
        for name, gone in missing.items()
    }


def total(found: Mapping[str, Gradient]) -> float | None:
    """The global norm over all parameters; None where none has a gradient."""
    norms = [g.norm for g in found.values() if g.norm is not None]
    return math.sqrt(sum(norm * norm for norm in norms)) if norms else None


def loss(trace: Trace, step: int) -> float:
    """The mean over ranks of a step's summed micro-batch losses: one number for people."""
    sums = [sum(rank.steps[step].losses) for rank in trace.ranks]
    return sum(sums) / len(sums)
