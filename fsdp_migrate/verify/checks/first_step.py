"""
Step 0, where nothing can have drifted yet: losses to the bit, gradient norms to a rounding.

The loss is blind to a factor on all gradients (clipping and Adam undo it); the norm is not.
"""

from __future__ import annotations

from fsdp_migrate.verify.checks import kernels
from fsdp_migrate.verify.checks.factors import recognise
from fsdp_migrate.verify.trial import Clip, Trace
from fsdp_migrate.verify.verdict import Finding, Pair
from fsdp_migrate.verify.wholes import Gradient, gradients, total

NORM_FP32, NORM_LOW = 1e-6, 1e-5


def check(pair: Pair) -> Finding | None:
    return (
        _losses(pair)
        or _orphans(pair)
        or _norms(pair, "raw")
        or _clipping(pair)
        or _norms(pair, "final")
    )


def _losses(pair: Pair) -> Finding | None:
    allowed = kernels.loss_tolerance(pair)
    for rank, micro, was, now in kernels.losses(pair, 0):
        if was != now and not abs(was - now) <= allowed * abs(was):
            return Finding(
                f"the loss of micro-batch {micro} differs at step 0: {was!r} before, {now!r} after"
                f"{_random(pair, rank)}",
                step=0,
                rank=rank,
            )
    return None


def _random(pair: Pair, rank: int | None) -> str:
    """Dropout draws from the random state: say when that is not the same."""
    if rank is None:
        return ""
    was, now = pair.before.ranks[rank].steps[0].random, pair.after.ranks[rank].steps[0].random
    if was == now:
        return ""
    return ", and the random state at the forward differs (a seed that changed moves dropout)"


def _orphans(pair: Pair) -> Finding | None:
    before, after = gradients(pair.before, 0, "final"), gradients(pair.after, 0, "final")
    lost = [n for n, g in before.items() if g.norm and n in after and after[n].norm is None]
    if not lost:
        return None
    count = (
        "no parameter" if len(lost) == len(before) else f"{len(lost)} parameters, {lost[0]} first,"
    )
    verb = "has" if len(lost) == len(before) else "have no"
    return Finding(
        f"{count} {verb} a gradient when the optimizer steps in the second run: the last "
        "micro-batch was not synchronised, or the graph does not reach them",
        step=0,
        tensor=lost[0],
    )


def _norms(pair: Pair, which: str) -> Finding | None:
    before, after = gradients(pair.before, 0, which), gradients(pair.after, 0, which)
    if finding := _replicas(after, before, which):
        return finding
    was, now = total(before), total(after)
    allowed = norm_tolerance(pair)
    if was is None or now is None or was == now or abs(was - now) <= allowed * was:
        return None
    place = "after backward" if which == "raw" else "at the optimizer"
    factor = recognise(was, now, pair.after)
    tensor, detail = _culprit(before, after, allowed, pair.after)
    return Finding(
        f"the gradient norm {place} differs at step 0: {was:.9g} before, {now:.9g} after"
        f"{f' ({factor})' if factor else detail}",
        step=0,
        tensor=tensor,
        factor=factor,
    )


def equal_gradients(pair: Pair) -> bool:
    """Whether step 0's gradients agree, to fp64 rounding, before they are clipped."""
    was, now = (total(gradients(trace, 0, "raw")) for trace in (pair.before, pair.after))
    return was is not None and now is not None and abs(was - now) <= 1e-12 * was


def norm_tolerance(pair: Pair) -> float:
    """Looser where sums may be made in another order in a low precision."""
    return max(NORM_FP32 if pair.fp32 else NORM_LOW, kernels.order_noise(pair))


def _replicas(
    after: dict[str, Gradient], before: dict[str, Gradient], which: str
) -> Finding | None:
    for name, gradient in after.items():
        if gradient.split and not (name in before and before[name].split):
            one, other = gradient.split
            return Finding(
                f"the gradient of {name} differs between ranks {one} and {other}, which hold the "
                "same elements: it is not averaged over replicas",
                step=0,
                rank=other,
                tensor=name,
            )
    del which
    return None


def _culprit(
    before: dict[str, Gradient], after: dict[str, Gradient], allowed: float, trace: Trace
) -> tuple[str | None, str]:
    """The parameters whose norms differ most, and whether they are few."""
    gaps = []
    for name, was in before.items():
        now = after.get(name)
        if was.norm and now and now.norm is not None:
            gaps.append((abs(now.norm / was.norm - 1), name))
    off = [gap for gap in gaps if gap[0] > max(allowed, 1e-6) * 10]
    worst = max(gaps, default=(0.0, None))[1]
    if not worst:
        return None, ""
    one, other = before[worst].norm, after[worst].norm
    local = recognise(one, other, trace)
    few = f", in {len(off)} of {len(gaps)} parameters" if off else ""
    meaning = f" ({local})" if local else ""
    return worst, f"{few}; most in {worst}: {one:.6g} before, {other:.6g} after{meaning}"


def _clipping(pair: Pair) -> Finding | None:
    """Who clips, and to what: an inactive clip that is lost shows in no number at step 0."""
    for index in range(min(pair.before.steps, pair.after.steps)):
        was = pair.before.ranks[0].steps[index].clips
        now = pair.after.ranks[0].steps[index].clips
        if [c.limit for c in was] == [c.limit for c in now]:
            continue
        if now and was:
            return Finding(
                f"gradients are clipped to {_limits(was)} before, {_limits(now)} after",
                step=index,
            )
        if was and not _scaled(pair.after):
            return Finding(
                f"gradient clipping is lost: the first run clips to {was[0].limit:g} at step "
                f"{index}, the second does not clip",
                step=index,
            )
        if now and not _scaled(pair.before):
            return Finding(f"only the second run clips gradients (to {now[0].limit:g})", step=index)
    return None


def _limits(clips: tuple[Clip, ...]) -> str:
    return " and ".join(f"{clip.limit:g}" for clip in clips)


def _scaled(trace: Trace) -> bool:
    """Whether gradients change between backward and the optimizer: a clip written by hand."""
    raw, final = total(gradients(trace, 0, "raw")), total(gradients(trace, 0, "final"))
    return raw is not None and final is not None and abs(raw - final) > 1e-3 * raw
