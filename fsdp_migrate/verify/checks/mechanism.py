"""
Is there anything to compare: FSDP1 in the first run, FSDP2 in the second, the same training?

Runs that prove nothing (no steps, no FSDP) are INCONCLUSIVE; a training set up differently FAILs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fsdp_migrate.verify.trial import Optimizer, Parameter, Trace
from fsdp_migrate.verify.verdict import Finding, Kind, Pair


def check(pair: Pair) -> Finding | None:
    tests = (_vacuous, _units, _names, _sharding, _optimizers, _precision, _micro_batches)
    return next((finding for test in tests if (finding := test(pair))), None)


def set_up(pair: Pair) -> Finding | None:
    """What can be told of a run that did not reach its first step."""
    tests = (_sharding, _precision)
    return next((finding for test in tests if (finding := test(pair))), None)


def params(trace: Trace) -> dict[str, Parameter]:
    """Parameters as rank 0 saw them."""
    model = trace.ranks[0].model
    return dict(model.params) if model else {}


def _inconclusive(message: str) -> Finding:
    return Finding(message, Kind.INCONCLUSIVE)


def _vacuous(pair: Pair) -> Finding | None:
    for which, trace in (("first", pair.before), ("second", pair.after)):
        if not trace.steps:
            return _inconclusive(f"the {which} run made no optimizer step")
        if not any(step.losses for rank in trace.ranks for step in rank.steps):
            return _inconclusive(f"the {which} run never called backward on a loss")
    for index in range(pair.before.steps):
        for rank in pair.before.ranks:
            if not all(map(math.isfinite, rank.steps[index].losses)):
                return _inconclusive(
                    f"the first run's loss is not finite at step {index} on rank {rank.rank}: "
                    "from there on anything equals anything"
                )
    return None


def _units(pair: Pair) -> Finding | None:
    before, after = _census(pair.before), _census(pair.after)
    if not before.get("fsdp1"):
        return _inconclusive(f"the first run has no FSDP1 module{_instead(before)}")
    if not after.get("fsdp2"):
        return _inconclusive(f"the second run has no FSDPModule{_instead(after)}")
    if after.get("fsdp1"):
        return _inconclusive(f"the second run still has {after['fsdp1']} FSDP1 modules")
    return None


def _census(trace: Trace) -> dict[str, int]:
    model = trace.ranks[0].model
    return dict(model.units) if model else {}


def _instead(units: dict[str, int]) -> str:
    if units.get("fsdp1"):
        return ": it is an FSDP1 run itself"
    if units.get("fsdp2"):
        return ": it is an FSDP2 run itself"
    if units.get("ddp"):
        return ": it fell back to DistributedDataParallel"
    return ": its model is not sharded at all"


def _names(pair: Pair) -> Finding | None:
    before, after = params(pair.before), params(pair.after)
    ties = [
        set(model.ties) if (model := trace.ranks[0].model) else set()
        for trace in (pair.before, pair.after)
    ]
    for tie in sorted(ties[0] - ties[1]):
        return Finding(
            f"{' and '.join(tie)} are one parameter in the first run and not in the second: "
            "the tie is lost",
            tensor=tie[0],
        )
    for tie in sorted(ties[1] - ties[0]):
        return Finding(
            f"{' and '.join(tie)} are one parameter in the second run only", tensor=tie[0]
        )
    aliases = {name for tie in ties[0] for name in tie}
    for name in sorted(before.keys() ^ after.keys()):
        if name not in aliases:
            where = "first" if name in before else "second"
            return Finding(f"parameter {name} exists in the {where} run only", tensor=name)
    for name in before.keys() & after.keys():
        if before[name].shape != after[name].shape:
            return Finding(
                f"{name} has shape {before[name].shape} before, {after[name].shape} after",
                tensor=name,
            )
    return None


def _sharding(pair: Pair) -> Finding | None:
    before, after = params(pair.before), params(pair.after)
    lost = [
        n for n in before if n in after and before[n].kind == "fsdp1" and after[n].kind == "plain"
    ]
    if lost:
        return Finding(
            f"{_some(lost)} managed by FSDP1 in the first run, in the second neither sharded nor "
            "averaged over ranks: fully_shard was not applied",
            tensor=lost[0],
        )
    return None


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{names[0]} and {len(names) - 1} more parameters are"


def _optimizers(pair: Pair) -> Finding | None:
    sides = [trace.ranks[0].optimizers for trace in (pair.before, pair.after)]
    if len(sides[0]) != len(sides[1]):
        return Finding(
            f"{len(sides[0])} optimizers step in the first run, {len(sides[1])} in the second"
        )
    for index, (before, after) in enumerate(zip(*sides, strict=True)):
        label = f"optimizer {index}" if len(sides[0]) > 1 else "the optimizer"
        if finding := _optimizer(label, before, after):
            return finding
    return None


def _optimizer(label: str, before: Optimizer, after: Optimizer) -> Finding | None:
    if before.strangers and before.strangers == before.tensors:
        return _inconclusive(
            f"{label} of the first run holds {before.strangers} parameters that are not the "
            "model's (FSDP1 without use_orig_params replaced them), so it trains nothing: the "
            "baseline itself is wrong"
        )
    if after.strangers and not before.strangers:
        return Finding(
            f"{label} holds {after.strangers} of {after.tensors} parameters that are no longer the "
            "model's: it was built before fully_shard, and trains nothing",
            tensor=next(iter(before.hyperparameters), None),
        )
    if before.kind != after.kind:
        return Finding(f"{label} is {before.kind} before, {after.kind} after")
    for name in sorted(before.hyperparameters.keys() ^ after.hyperparameters.keys()):
        where = "first" if name in before.hyperparameters else "second"
        return Finding(f"{label} trains {name} in the {where} run only", tensor=name)
    for name, options in before.hyperparameters.items():
        for key, was, now in _differences(options, after.hyperparameters[name]):
            return Finding(
                f"{key} of {label} is {_number(was)} before, {_number(now)} after (for {name})",
                tensor=name,
            )
    return None


def _differences(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "absent"), after.get(key, "absent")
        if was != now:
            yield key, was, now


def _number(value: Any) -> str:
    if isinstance(value, list):
        return "(" + ", ".join(map(_number, value)) + ")"
    try:
        return f"{float.fromhex(value):.10g}" if isinstance(value, str) else str(value)
    except ValueError:
        return str(value)


def _precision(pair: Pair) -> Finding | None:
    before, after = params(pair.before), params(pair.after)
    for name, was in before.items():
        now = after.get(name)
        if now is None or was.kind != "fsdp1" or now.kind == "plain":
            continue
        for what, one, other in (
            ("computed in", was.compute_dtype, now.compute_dtype),
            ("reduced in", was.reduce_dtype, now.reduce_dtype),
        ):
            if one != other:
                thing = "parameters are" if what.startswith("comp") else "gradients are"
                return Finding(
                    f"{thing} {what} {_dtype(one)} before, {_dtype(other)} after (for {name})",
                    tensor=name,
                )
    return None


def _dtype(name: str) -> str:
    return name.removeprefix("torch.")


def _micro_batches(pair: Pair) -> Finding | None:
    for before, after in zip(pair.before.ranks, pair.after.ranks, strict=False):
        for index, (one, other) in enumerate(zip(before.steps, after.steps, strict=False)):
            if len(one.losses) != len(other.losses):
                return Finding(
                    f"step {index} has {len(one.losses)} micro-batches before, "
                    f"{len(other.losses)} after",
                    step=index,
                    rank=before.rank,
                )
    return None
