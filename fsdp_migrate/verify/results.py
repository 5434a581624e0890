"""
`result.json`: everything verify found out, in one object.

    schema        1
    verdict       {result, title, message, check, step, rank, tensor, factor}
    passed        names of the checks that passed, in order
    notes         what limits the proof
    redirections  CUDA calls that ran on the CPU
    experiment    the scripts, arguments, ranks, steps, seed, modes
    pairs         by name (exact, fp32, native): device, peak_bytes and steps, each step with
                  loss, difference, envelope, gradient_norm (at the optimizer),
                  unclipped_norm (as clip_grad_norm_ told the script), seconds, learning_rates

Numbers are JSON numbers with all digits (`repr` of a double reads back exactly); a number that is
not finite is the string "nan", "inf" or "-inf".
"""

from __future__ import annotations

import math
from typing import Any

from fsdp_migrate.verify.experiment import Experiment, Side
from fsdp_migrate.verify.verdict import Parity, Point, Series, Verdict

SCHEMA = 1


def as_dict(parity: Parity, experiment: Experiment) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": _verdict(parity.verdict),
        "passed": list(parity.passed),
        "notes": list(parity.notes),
        "redirections": list(parity.redirections),
        "experiment": _experiment(experiment),
        "pairs": {series.name: _series(series) for series in parity.series},
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    finding = verdict.finding
    return {
        "result": verdict.kind.name,
        "title": verdict.title,
        "message": verdict.message,
        "check": verdict.check,
        "step": finding and finding.step,
        "rank": finding and finding.rank,
        "tensor": finding and finding.tensor,
        "factor": finding and finding.factor,
    }


def _experiment(experiment: Experiment) -> dict[str, Any]:
    return {
        "before": _side(experiment.before),
        "after": _side(experiment.after),
        "steps": experiment.steps,
        "seed": experiment.seed,
        "device": experiment.device,
        "modes": list(experiment.modes),
        "same_init": experiment.same_init,
        "nnodes": experiment.nnodes,
        "nproc_per_node": experiment.nproc_per_node,
        "folder": str(experiment.folder),
    }


def _side(side: Side) -> dict[str, Any]:
    return {"script": str(side.script), "args": list(side.args)}


def _series(series: Series) -> dict[str, Any]:
    return {
        "device": series.device,
        "peak_bytes": {"before": series.peak_before, "after": series.peak_after},
        "steps": [_point(point) for point in series.points],
    }


def _point(point: Point) -> dict[str, Any]:
    return {
        "step": point.step,
        "loss": {"before": _number(point.before), "after": _number(point.after)},
        "difference": _number(point.difference),
        "envelope": _number(point.envelope),
        "gradient_norm": {
            "before": _number(point.norm_before),
            "after": _number(point.norm_after),
        },
        "unclipped_norm": {
            "before": _number(point.unclipped_before),
            "after": _number(point.unclipped_after),
        },
        "seconds": {"before": point.seconds_before, "after": point.seconds_after},
        "learning_rates": list(point.rates),
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
