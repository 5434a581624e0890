"""From the traces of both scripts to a verdict: the checks in order, the first finding decides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fsdp_migrate.verify.checks import FOUNDATIONS, exact, first_step, kernels, native
from fsdp_migrate.verify.trial import Trace
from fsdp_migrate.verify.verdict import Finding, Kind, Pair, Parity, Point, Series, Verdict
from fsdp_migrate.verify.wholes import gradients, loss, total

TITLES = {Kind.FAIL: "FAIL", Kind.INCONCLUSIVE: "INCONCLUSIVE"}


def judge(pairs: Sequence[Pair]) -> Parity:
    """Judge the pairs, exact ones first; without pairs nothing was compared."""
    state = _Judgement(pairs)
    verdict = state.verdict()
    return Parity(
        verdict=verdict,
        passed=tuple(state.passed),
        series=tuple(series(pair) for pair in pairs),
        notes=tuple(dict.fromkeys(state.notes)),
        redirections=tuple(_redirections(pairs)),
    )


class _Judgement:
    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        self.passed: list[str] = []
        self.notes: list[str] = []

    def verdict(self) -> Verdict:
        if not self.pairs:
            return _stopped("run", Finding("no mode was run", Kind.INCONCLUSIVE))
        for pair in self.pairs:
            if finding := _ended(pair):
                return _stopped("run", finding)
        for pair in self.pairs:
            for name, check in FOUNDATIONS:
                if finding := check(pair):
                    return _stopped(name, finding)
        self.passed += [name for name, _ in FOUNDATIONS]
        return self._exact_then_native()

    def _exact_then_native(self) -> Verdict:
        exacts = [pair for pair in self.pairs if pair.exact]
        natives = [pair for pair in self.pairs if not pair.exact]
        bitwise, finding = self._exact(exacts)
        if finding:
            return _stopped("exact", finding)
        judged = natives if bitwise else [*natives, *exacts]
        for pair in judged:
            if finding := native.check(pair):
                return _stopped("native", finding)
            self.passed.append(pair.name)
        return self._pass(bitwise, exacts)

    def _exact(self, exacts: Sequence[Pair]) -> tuple[bool, Finding | None]:
        """(all equal to the bit, the finding that ends the judgement)."""
        bitwise = bool(exacts)
        for pair in exacts:
            if finding := exact.engaged(pair):
                return False, finding
            finding = exact.check(pair)
            if finding is None:
                self.passed.append(pair.name)
                continue
            bitwise = False
            if reason := kernels.why_not_exact(pair):
                self.notes.append(f"equal bits are not to be expected: {reason}")
            elif self._is_rounding(pair):
                self.notes.append(
                    f"exact mode is not equal to the bit, by a rounding that the script makes "
                    f"itself (a norm it adds up by hand, perhaps): {finding.message}"
                )
            else:
                return False, finding
        return bitwise, None

    def _is_rounding(self, pair: Pair) -> bool:
        """
        Whether what separates the runs is a sum of the script's own, made in another order.

        Told in fp32, where a bug stands thousands of times above the noise: gradients equal before
        anything is done to them, and the rest inside the measured envelope.
        """
        lifted = [other for other in self.pairs if other.exact and other.fp32]
        if not lifted:
            return False
        return all(
            one.controls and first_step.equal_gradients(one) and native.check(one) is None
            for one in {pair.name: pair, lifted[0].name: lifted[0]}.values()
        )

    def _pass(self, bitwise: bool, exacts: Sequence[Pair]) -> Verdict:
        steps = self.pairs[0].before.steps
        ranks = len(self.pairs[0].before.ranks)
        if bitwise:
            precisions = " and in fp32" if any(p.fp32 for p in exacts[1:]) else ""
            return Verdict(
                Kind.PASS,
                "PASS (bitwise)",
                f"{steps} steps on {ranks} ranks, losses, gradient norms, parameters and optimizer "
                f"state equal to the bit{precisions}",
            )
        return Verdict(
            Kind.PASS,
            "PASS (within noise)",
            f"{steps} steps on {ranks} ranks, the drift is what rounding does to the first run",
        )


def _stopped(check: str, finding: Finding) -> Verdict:
    return Verdict(finding.kind, TITLES[finding.kind], finding.message, check, finding)


def _ended(pair: Pair) -> Finding | None:
    """Equal numbers of steps, or the first place where one run goes on alone."""
    before, after = pair.before.steps, pair.after.steps
    if before != after and before and after:
        return Finding(
            f"the first run made {before} optimizer steps, the second {after}",
            step=min(before, after),
        )
    return None


def _redirections(pairs: Sequence[Pair]) -> Iterator[str]:
    notes = [n for p in pairs for t in (p.before, p.after) for r in t.ranks for n in r.notes]
    yield from dict.fromkeys(
        n.removeprefix("redirected: ") for n in notes if n.startswith("redirected")
    )


def series(pair: Pair) -> Series:
    """A pair's numbers, step by step, for tables and pictures."""
    known = pair.controls and pair.before.ranks
    # Where equal bits are due, no difference is allowed: an envelope would say otherwise.
    due = known and pair.exact and kernels.why_not_exact(pair) is None
    limits = list(native.envelope(pair)) if known and not due else []
    count = min(pair.before.steps, pair.after.steps)
    points = tuple(_point(pair, step, limits[step] if limits else None) for step in range(count))
    device = pair.before.ranks[0].device if pair.before.ranks else ""
    return Series(pair.name, points, _peak(pair.before), _peak(pair.after), device)


def _point(pair: Pair, step: int, limit: float | None) -> Point:
    gaps = [native.relative(was, now) for _, _, was, now in kernels.losses(pair, step)]
    first, second = pair.before.ranks[0].steps[step], pair.after.ranks[0].steps[step]
    return Point(
        step=step,
        before=loss(pair.before, step),
        after=loss(pair.after, step),
        difference=max(gaps, default=0.0),
        envelope=limit,
        norm_before=total(gradients(pair.before, step, "final")),
        norm_after=total(gradients(pair.after, step, "final")),
        seconds_before=first.seconds,
        seconds_after=second.seconds,
        rates=tuple(rate for rates in second.rates for rate in rates),
        unclipped_before=_unclipped(pair.before, step),
        unclipped_after=_unclipped(pair.after, step),
    )


def _unclipped(trace: Trace, step: int) -> float | None:
    """A clipped norm is flat at its limit and shows nothing."""
    if clips := trace.ranks[0].steps[step].clips:
        return math.hypot(*(clip.norm for clip in clips))
    return total(gradients(trace, step, "final"))


def _peak(trace: Trace) -> int:
    return max((step.peak for rank in trace.ranks for step in rank.steps), default=0)
