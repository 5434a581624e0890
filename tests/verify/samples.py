"""Verdicts with numbers made up by formula: what the tables, pictures and the report must show."""

from __future__ import annotations

import math
from pathlib import Path

from fsdp_migrate.verify.experiment import Experiment, Side
from fsdp_migrate.verify.verdict import Finding, Kind, Parity, Point, Series, Verdict

STEPS = 20


def point(step: int, difference: float, envelope: float | None) -> Point:
    loss = 4 * math.exp(-step / 9) + 0.3 * math.sin(step)
    return Point(
        step=step,
        before=loss,
        after=loss * (1 + difference),
        difference=difference,
        envelope=envelope,
        norm_before=2 / (1 + step),
        norm_after=2 / (1 + step),
        seconds_before=0.030 + 0.004 * (step % 3),
        seconds_after=0.028 + 0.003 * (step % 4),
        rates=(3e-3 / (1 + step),),
        unclipped_before=4 / (1 + step),
        unclipped_after=4 / (1 + step),
    )


def series(name: str, differences: list[float], *, allowed: bool) -> Series:
    points = tuple(
        point(step, gap, 3e-7 * (1 + step) if allowed else None)
        for step, gap in enumerate(differences)
    )
    return Series(name, points, 400 << 20, 380 << 20, "cpu")


EQUAL = series("exact", [0.0] * STEPS, allowed=False)
NOISE = series("native", [0.0, 0.0, *(1e-7 * (1 + s % 4) for s in range(18))], allowed=True)
BROKEN = series("native", [0.0, 0.0, 1e-7, *(2e-4 * s for s in range(1, 18))], allowed=True)

EXPERIMENT = Experiment(
    before=Side(Path("train.py"), ("--lr", "<b>1e-3</b>")),
    after=Side(Path("train_fsdp2.py")),
    folder=Path("out"),
)
PASS = Parity(
    Verdict(Kind.PASS, "PASS (bitwise)", "20 steps on 2 ranks, equal to the bit"),
    ("mechanism", "start", "data", "first step", "exact"),
    (EQUAL, NOISE),
    (),
    ("torch.cuda.set_device", "init_process_group(nccl)"),
)
FAIL = Parity(
    Verdict(
        Kind.FAIL,
        "FAIL",
        "first difference at step 3 in <layers.0.weight>",
        "native",
        Finding("first difference at step 3 in <layers.0.weight>", step=3),
    ),
    ("mechanism", "start"),
    (BROKEN,),
    ("dropout & co.",),
    (),
)
NOTHING = Parity(
    Verdict(Kind.INCONCLUSIVE, "INCONCLUSIVE", "both runs fell back to DDP", "mechanism"),
    (),
    (),
    (),
    (),
)
