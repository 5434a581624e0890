"""Do both runs start from the same point: parameters, buffers, optimizer state, learning rates?"""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_migrate.verify.checks.mechanism import params
from fsdp_migrate.verify.trial import Trace
from fsdp_migrate.verify.verdict import Finding, Kind, Pair
from fsdp_migrate.verify.wholes import Whole, start_params, start_state


def check(pair: Pair) -> Finding | None:
    tests = (_attributes, _values, _buffers, _optimizer_state, _rates)
    return next((finding for test in tests if (finding := test(pair))), None)


def _attributes(pair: Pair) -> Finding | None:
    before, after = params(pair.before), params(pair.after)
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            continue
        if was.requires_grad != now.requires_grad:
            change = (
                "frozen before, trained after"
                if now.requires_grad
                else "trained before, frozen after"
            )
            return Finding(f"{name} is {change}", tensor=name)
        if was.dtype != now.dtype:
            return Finding(f"{name} is {was.dtype} before, {now.dtype} after", tensor=name)
    return None


def _values(pair: Pair) -> Finding | None:
    before, after = start_params(pair.before), start_params(pair.after)
    for name in before:
        if finding := _replicas(name, name, before[name], after.get(name)):
            return finding
    different = [n for n in before if n in after and before[n].bits != after[n].bits]
    if not different:
        return None
    name = different[0]
    return Finding(
        f"the initial values of {_listed(different)} differ "
        f"(norm of {name}: {before[name].norm:.6g} before, {after[name].norm:.6g} after)",
        tensor=name,
    )


def _replicas(what: str, name: str, before: Whole, after: Whole | None) -> Finding | None:
    """Replicas that disagree: in the first run no baseline, in the second a bug."""
    for which, whole in (("first", before), ("second", after)):
        if whole is not None and whole.split:
            one, other = whole.split
            baseline = which == "first"
            return Finding(
                f"{what} starts with different values on ranks {one} and {other} of the {which} "
                f"run, which hold the same elements"
                f"{': the baseline itself is wrong' if baseline else ''}",
                Kind.INCONCLUSIVE if baseline else Kind.FAIL,
                rank=other,
                tensor=name,
            )
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _buffers(pair: Pair) -> Finding | None:
    if len(pair.before.ranks) != len(pair.after.ranks):
        return None
    for before, after in zip(pair.before.ranks, pair.after.ranks, strict=True):
        ours = before.model.buffers if before.model else {}
        theirs = after.model.buffers if after.model else {}
        for name, was in ours.items():
            now = theirs.get(name)
            if now is None:
                return Finding(f"buffer {name} exists in the first run only", tensor=name)
            # FSDP1 may cast buffers at the first forward, and a migration may do so before it.
            if now["print"] not in was.values():
                return Finding(
                    f"buffer {name} starts with other values on rank {before.rank}"
                    f"{_dtypes(was, now)}{_not_broadcast(pair.after, name)}",
                    rank=before.rank,
                    tensor=name,
                )
    return None


def _dtypes(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A cast is the usual reason: FSDP1's buffer_dtype has no counterpart."""
    one, other = (text["print"].split()[-2] for text in (was, now))
    return "" if one == other else f" ({one} before, {other} after)"


def _not_broadcast(after: Trace, name: str) -> str:
    prints = {rank.model.buffers[name]["print"] for rank in after.ranks if rank.model}
    return (
        ": the second run has different values on each rank, it is not broadcast"
        if len(prints) > 1
        else ""
    )


def _optimizer_state(pair: Pair) -> Finding | None:
    for index, optimizer in enumerate(pair.after.ranks[0].optimizers):
        first = pair.before.ranks[0].optimizers[index]
        for shared in optimizer.shared_state:
            if first.tensors == optimizer.tensors and shared in first.shared_state:
                continue
            return Finding(
                f"optimizer state {shared} is one tensor in the second run: every one of these "
                "parameters advances it in each step",
                tensor=shared.split(" of ")[1].split(", ")[0],
            )
        before, after = start_state(pair.before, index), start_state(pair.after, index)
        for name, key in sorted(before.keys() | after.keys()):
            was, now = before.get((name, key)), after.get((name, key))
            if finding := _entry(f"{key} of {name}", name, was, now):
                return finding
    return None


def _entry(label: str, name: str, was: object, now: object) -> Finding | None:
    if was is None or now is None:
        where = "first" if now is None else "second"
        return Finding(f"optimizer state {label} is there in the {where} run only", tensor=name)
    if isinstance(was, Whole) and isinstance(now, Whole):
        if split := _replicas(f"optimizer state {label}", name, was, now):
            return split
        if was.bits != now.bits:
            return Finding(
                f"optimizer state {label} starts differently (norm {was.norm:.6g} before, "
                f"{now.norm:.6g} after)",
                tensor=name,
            )
    elif was != now:
        return Finding(
            f"optimizer state {label} starts at {_shown(was)} before, {_shown(now)} after",
            tensor=name,
        )
    return None


def _shown(value: object) -> str:
    return ", ".join(map(_value, value)) if isinstance(value, frozenset) else "a tensor"


def _value(value: object) -> str:
    return (
        f"{float.fromhex(value):g}"
        if isinstance(value, str) and value.startswith("0x")
        else str(value)
    )


def _rates(pair: Pair) -> Finding | None:
    """The scheduler's place: learning rates at the first step and at every later one."""
    for index, (one, other) in enumerate(
        zip(pair.before.ranks[0].steps, pair.after.ranks[0].steps, strict=False)
    ):
        was = sorted({rate for rates in one.rates for rate in rates})
        now = sorted({rate for rates in other.rates for rate in rates})
        if was != now:
            return Finding(
                f"the learning rate at step {index} is {_rates_shown(was)} before, "
                f"{_rates_shown(now)} after",
                step=index,
            )
    return None


def _rates_shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.10g}" for rate in rates)
