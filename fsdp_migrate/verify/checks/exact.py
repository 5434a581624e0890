"""
Exact mode: every loss, norm, parameter and optimizer state equal to the bit.

Only meaningful when the rank-ordered sums really ran: the calls are counted in both runs.
"""

from __future__ import annotations

from fsdp_migrate.verify.checks.kernels import losses
from fsdp_migrate.verify.trial import Trace
from fsdp_migrate.verify.verdict import Finding, Kind, Pair
from fsdp_migrate.verify.wholes import (
    Whole,
    final_params,
    final_state,
    gradients,
    total,
)

NORM = 1e-12  # fp64 sums of the same numbers, cut differently over ranks


def engaged(pair: Pair) -> Finding | None:
    for which, trace in (("first", pair.before), ("second", pair.after)):
        if not all(rank.exact_calls for rank in trace.ranks):
            return Finding(
                f"exact mode never took hold in the {which} run: none of its gradient reductions "
                "went through torch.distributed's own functions",
                Kind.INCONCLUSIVE,
            )
    return None


def check(pair: Pair) -> Finding | None:
    for step in range(min(pair.before.steps, pair.after.steps)):
        if finding := _losses(pair, step) or _norms(pair, step) or _counts(pair, step):
            return finding
    return _params(pair) or _state(pair)


def _losses(pair: Pair, step: int) -> Finding | None:
    for rank, micro, was, now in losses(pair, step):
        if was != now and not (was != was and now != now):
            return Finding(
                f"the loss of micro-batch {micro} differs at step {step}: "
                f"{was!r} before, {now!r} after",
                step=step,
                rank=rank,
            )
    return None


def _norms(pair: Pair, step: int) -> Finding | None:
    before, after = gradients(pair.before, step, "final"), gradients(pair.after, step, "final")
    for name, was in before.items():
        now = after.get(name)
        if now is None or was.norm == now.norm:
            continue
        if was.norm is None or now.norm is None or not abs(was.norm - now.norm) <= NORM * was.norm:
            return Finding(
                f"the gradient of {name} differs at step {step}: norm {was.norm} before, "
                f"{now.norm} after (all: {total(before)} before, {total(after)} after)",
                step=step,
                tensor=name,
            )
    return None


def _counts(pair: Pair, step: int) -> Finding | None:
    was, now = pair.before.ranks[0].steps[step].counts, pair.after.ranks[0].steps[step].counts
    if was == now:
        return None
    return Finding(
        f"after step {step} the optimizer's step counters are at "
        f"{'; '.join(was) or 'nothing'} before, {'; '.join(now) or 'nothing'} after",
        step=step,
    )


def _params(pair: Pair) -> Finding | None:
    before, after = final_params(pair.before), final_params(pair.after)
    for name, was in before.items():
        now = after.get(name)
        if now is not None and was.bits != now.bits:
            return Finding(
                f"{name} differs after the last step "
                f"(relative distance about {was.distance(now):.2e})",
                step=_last(pair.before),
                tensor=name,
            )
    return None


def _state(pair: Pair) -> Finding | None:
    for index in range(len(pair.before.ranks[0].optimizers)):
        before, after = final_state(pair.before, index), final_state(pair.after, index)
        for name, key in sorted(before.keys() | after.keys()):
            was, now = before.get((name, key)), after.get((name, key))
            if isinstance(was, Whole) and isinstance(now, Whole):
                differs = was.bits != now.bits
            else:
                differs = was != now
            if differs:
                return Finding(
                    f"optimizer state {key} of {name} differs after the last step",
                    step=_last(pair.before),
                    tensor=name,
                )
    return None


def _last(trace: Trace) -> int:
    return trace.steps - 1
