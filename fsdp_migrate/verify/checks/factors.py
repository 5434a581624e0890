"""Ratios of gradient norms that tell a bug by themselves."""

from __future__ import annotations

import math

from fsdp_migrate.verify.trial import Trace

CLOSE = 1e-3


def recognise(before: float | None, after: float | None, trace: Trace) -> str | None:
    """What after / before means, when it is a factor that distributed training knows."""
    if not before or not after:
        return None
    ratio = after / before
    for value, meaning in _meanings(trace):
        if value != 1 and abs(ratio / value - 1) < CLOSE:
            return f"x{ratio:.6g}: {meaning}"
    return None


def _meanings(trace: Trace) -> list[tuple[float, str]]:
    world = len(trace.ranks)
    step = trace.ranks[0].steps[0]
    micro = len(step.losses)
    degrees = (
        next(iter(trace.ranks[0].model.params.values())).degrees
        if trace.ranks[0].model
        else (1, 1, 1)
    )
    known = [
        (world, f"the world size {world}: gradients are summed over ranks, not averaged"),
        (1 / world, f"1/{world}: gradients are divided by the world size once too often"),
        (
            math.sqrt(world),
            f"the square root of the world size {world}: a norm over replicas is added up",
        ),
        (1 / math.sqrt(world), f"1/sqrt({world}): a rank's local norm stands for the global one"),
        (micro, f"{micro} micro-batches: the loss is not divided by the accumulation steps"),
        (1 / micro, f"1/{micro}: the loss is divided by the accumulation steps once too often"),
    ]
    for degree, name in zip(degrees[:2], ("shards", "replicas"), strict=True):
        known.append((degree, f"{degree} {name}: gradients are summed over them, not averaged"))
        known.append((1 / degree, f"1/{degree}: gradients are averaged over the {name} twice"))
    if step.scale != 1:
        known.append((step.scale, "the gradient scale: gradients are not unscaled"))
        known.append((1 / step.scale, "the gradient scale: gradients are unscaled twice"))
    return known
