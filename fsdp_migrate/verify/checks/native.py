"""
Native mode: the drift of the second run inside what roundings alone do to the first.

The envelope is measured: the first script runs again with every gradient element moved by at most
one unit in the last place, and its drift from the plain run, as a running maximum, is what rounding
does to this training. Two correct runs may differ by a few times that, and not more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fsdp_migrate.verify.checks.kernels import losses, precision, same_kernels
from fsdp_migrate.verify.trial import Trace
from fsdp_migrate.verify.verdict import Finding, Kind, Pair
from fsdp_migrate.verify.wholes import final_params, gradients, total

TIMES = 3.0  # of the envelope; the worst ratio measured over 300 steps was 1.96
OTHER_KERNELS = 10.0  # in a low precision other kernels round more than sums do: fp32 decides
FLOOR = 4.0  # units in the last place, where a control happened not to move a number


def check(pair: Pair) -> Finding | None:
    if not pair.controls:
        return Finding("no control run of the first script was made", Kind.INCONCLUSIVE)
    allowed = list(envelope(pair))
    for step, limit in enumerate(allowed):
        for rank, micro, was, now in losses(pair, step):
            if not relative(was, now) <= limit:
                return Finding(
                    f"the loss of micro-batch {micro} leaves the noise at step {step}: "
                    f"{was:.9g} before, {now:.9g} after, {_against(was, now, limit)}",
                    step=step,
                    rank=rank,
                )
        if finding := _norm(pair, step):
            return finding
    return _params(pair)


def envelope(pair: Pair) -> Iterator[float]:
    """The allowed relative difference of a loss, step by step."""
    widest = 0.0
    floor = FLOOR * loss_eps(pair)
    for step in range(min(pair.before.steps, pair.after.steps)):
        for control in pair.controls:
            if step < control.steps:
                twin = Pair(pair.name, pair.before, control, pair.exact, pair.fp32)
                gaps = [relative(was, now) for _, _, was, now in losses(twin, step)]
                widest = max(widest, *gaps)
        yield times(pair) * widest + floor


def times(pair: Pair) -> float:
    """How many times the measured envelope is allowed."""
    return TIMES if pair.fp32 or same_kernels(pair) else TIMES * OTHER_KERNELS


def loss_eps(pair: Pair) -> float:
    """A unit in the last place of a loss: fp32's, or that of the precision it is computed in."""
    eps = precision(pair.before)
    # A loss is a mean over many rounded terms: their errors average out.
    return 2.0**-23 if eps <= 2.0**-23 else eps / 32


def relative(was: float, now: float) -> float:
    if was == now or (math.isnan(was) and math.isnan(now)):
        return 0.0
    gap = abs(was - now)
    return gap / abs(was) if was else math.inf


def _against(was: float, now: float, limit: float) -> str:
    return f"apart by {relative(was, now):.2e} where rounding explains {limit:.2e}"


def _norm(pair: Pair, step: int) -> Finding | None:
    was = total(gradients(pair.before, step, "final"))
    now = total(gradients(pair.after, step, "final"))
    if was is None or now is None:
        return None
    limit = times(pair) * _widest_norm(pair, step) + 16 * loss_eps(pair)
    if relative(was, now) <= limit:
        return None
    return Finding(
        f"the gradient norm leaves the noise at step {step}: {was:.9g} before, {now:.9g} after, "
        f"{_against(was, now, limit)}",
        step=step,
    )


def _widest_norm(pair: Pair, step: int) -> float:
    widest = 0.0
    for earlier in range(step + 1):
        was = total(gradients(pair.before, earlier, "final")) or 0.0
        for control in pair.controls:
            if earlier < control.steps:
                now = total(gradients(control, earlier, "final")) or 0.0
                widest = max(widest, relative(was, now))
    return widest


def _params(pair: Pair) -> Finding | None:
    """All parameters together, as a relative L2 distance."""
    apart = distance(pair.before, pair.after)
    limit = (
        times(pair) * max(distance(pair.before, control) for control in pair.controls) + 2.0**-22
    )
    if apart <= limit:
        return None
    before, after = final_params(pair.before), final_params(pair.after)
    worst = max((n for n in before if n in after), key=lambda n: before[n].distance(after[n]))
    return Finding(
        f"the parameters end further apart than rounding explains: "
        f"{apart:.2e} against {limit:.2e}, most in {worst}",
        step=pair.before.steps - 1,
        tensor=worst,
    )


def distance(one: Trace, other: Trace) -> float:
    """||a - b|| / ||a|| over all final parameters."""
    before, after = final_params(one), final_params(other)
    gaps = sum((before[n].distance(after[n]) * before[n].norm) ** 2 for n in before if n in after)
    size = sum(whole.norm**2 for whole in before.values())
    return math.sqrt(gaps / size) if size else 0.0
