"""
Which equality to expect of a pair, from how its two runs are laid out.

Equal layouts run equal kernels and add the same numbers, so bits must agree once the order of sums
is fixed. torch.compile, tensor parallelism in one run only, another mesh or another number of ranks
round differently by design; such pairs are judged by the measured envelope.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fsdp_migrate.verify.checks.mechanism import params
from fsdp_migrate.verify.trial import Trace
from fsdp_migrate.verify.verdict import Pair
from fsdp_migrate.verify.wholes import loss

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}


def why_not_exact(pair: Pair) -> str | None:
    """Why equal bits cannot be expected, or None when they must be."""
    if len(pair.before.ranks) != len(pair.after.ranks):
        return f"{len(pair.before.ranks)} ranks before, {len(pair.after.ranks)} after"
    if _compiled(pair.before) or _compiled(pair.after):
        return "torch.compile chooses other kernels"
    before, after = params(pair.before), params(pair.after)
    for name, was in before.items():
        if was.kind == "fsdp1" and name in after and was.degrees != after[name].degrees:
            ours, theirs = (_degrees(p.degrees) for p in (was, after[name]))
            return f"{name} is laid out over {ours} before, {theirs} after"
    return None


def same_kernels(pair: Pair) -> bool:
    """Whether a forward runs the same kernels on the same numbers in both runs."""
    if len(pair.before.ranks) != len(pair.after.ranks):
        return False
    if _compiled(pair.before) or _compiled(pair.after):
        return False
    tensor_parallel = [
        {name: p.degrees[2] for name, p in params(trace).items()}
        for trace in (pair.before, pair.after)
    ]
    return tensor_parallel[0] == tensor_parallel[1]


def _compiled(trace: Trace) -> bool:
    model = trace.ranks[0].model
    return bool(model and model.units.get("compiled"))


def _degrees(degrees: tuple[int, int, int]) -> str:
    shards, replicas, parallel = degrees
    text = f"{shards} shards x {replicas} replicas"
    return f"{text} x tensor parallel {parallel}" if parallel > 1 else text


def precision(trace: Trace) -> float:
    """The coarsest unit in the last place that the run computes or reduces in."""
    dtypes = {d for p in params(trace).values() for d in (p.compute_dtype, p.reduce_dtype, p.dtype)}
    return max(
        (EPS.get(dtype.removeprefix("torch."), 2.0**-23) for dtype in dtypes), default=2.0**-23
    )


def loss_tolerance(pair: Pair) -> float:
    """Relative; zero where the same kernels see the same numbers."""
    return 0.0 if same_kernels(pair) else 8 * precision(pair.before)


def order_noise(pair: Pair) -> float:
    """What another order of sums in the reduction's precision does to a norm, at most."""
    if not same_kernels(pair):
        return precision(pair.before) / 2
    ordered = pair.exact and why_not_exact(pair) is None
    if ordered or len(pair.before.ranks) <= 2:
        return 0.0
    elements = sum(math.prod(p.shape) for p in params(pair.before).values() if p.requires_grad)
    return 8 * precision(pair.before) / math.sqrt(max(elements, 1)) if elements else 0.0


def losses(pair: Pair, step: int) -> Iterator[tuple[int | None, int, float, float]]:
    """(rank, micro-batch, before, after); rank None: means over ranks, where ranks do not match."""
    if len(pair.before.ranks) != len(pair.after.ranks) or not _same_streams(pair):
        yield None, 0, loss(pair.before, step), loss(pair.after, step)
        return
    for before, after in zip(pair.before.ranks, pair.after.ranks, strict=True):
        for micro, (was, now) in enumerate(
            zip(before.steps[step].losses, after.steps[step].losses, strict=False)
        ):
            yield before.rank, micro, was, now


def _same_streams(pair: Pair) -> bool:
    """Whether rank r reads the same data in both runs: not so under another tensor parallelism."""
    sides = (pair.before, pair.after)
    parallel = [max((p.degrees[2] for p in params(t).values()), default=1) for t in sides]
    return parallel[0] == parallel[1]
