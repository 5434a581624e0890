"""The comparison table: one line a row, with what only the whole table can say about it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_migrate.errors import TargetError
from fsdp_migrate.verify.bench import peaks
from fsdp_migrate.verify.bench.outcome import Figures, Outcome, parity
from fsdp_migrate.verify.bench.setup import Setup


@dataclass(frozen=True, slots=True)
class Line:
    """
    None is "not available". Bytes, seconds, and fractions (`mfu` 0.4 is 40 %). `ratio` and the
    parity columns are against the row named `reference`.
    """

    name: str
    title: str
    status: str
    reason: str
    reference: str
    tokens_per_second_per_gpu: float | None = None
    ratio: float | None = None
    mfu: float | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    host_rss: int | None = None
    step_median: float | None = None
    step_q1: float | None = None
    step_q3: float | None = None
    parity: str | None = None  # bitwise | within noise | differs
    loss_difference: float | None = None
    gradient_norm_difference: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    setup: Setup
    device: str | None  # None: no row ran
    peak_flops: float | None
    peak_source: str
    mfu_note: str  # why MFU is n/a, if it is
    lines: tuple[Line, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def all_well(self) -> bool:
        """No row crashed, hung, or trained something other than its reference did."""
        bad = any(line.status in ("failed", "timed out") for line in self.lines)
        return not bad and all(line.parity != "differs" for line in self.lines)


def table(setup: Setup, outcomes: Sequence[Outcome], peak_tflops: float | None) -> Table:
    ran = {o.row.name: o.figures for o in outcomes if o.figures is not None}
    device = next((figures.device for figures in ran.values()), None)
    peak = peaks.peak(device or "", setup.dtype)
    if peak_tflops is not None:
        peak = peak_tflops * peaks.TERA
    source = "data sheet" if peak_tflops is None else "--peak-tflops"
    lines = tuple(_line(outcome, ran, setup.dtype, peak) for outcome in outcomes)
    note = next((f.flops_reason for f in ran.values() if f.flops_reason), "") or ""
    if device is not None and peak is None:
        note = f"no peak FLOP/s is known for {device} in {setup.dtype}: pass --peak-tflops"
    elif note:
        note = f"the model's FLOPs could not be counted: {note}"
    return Table(setup, device, peak, source, note, lines, tuple(outcomes))


def _line(outcome: Outcome, ran: dict[str, Figures], dtype: str, peak: float | None) -> Line:
    row, mine = outcome.row, outcome.figures
    reference = ran.get(row.reference)
    line: dict[str, Any] = {
        "name": row.name,
        "title": row.title,
        "status": outcome.status,
        "reason": outcome.reason,
        "reference": row.reference,
    }
    if mine is None:
        return Line(**line)
    line |= {
        "tokens_per_second_per_gpu": mine.tokens_per_second,
        "peak_allocated": mine.peak_allocated,
        "peak_reserved": mine.peak_reserved,
        "host_rss": mine.host_rss,
        "step_median": mine.step_median,
        "step_q1": mine.step_quartiles[0],
        "step_q3": mine.step_quartiles[1],
    }
    if peak is not None and mine.flops_per_token is not None:
        line["mfu"] = mine.flops_per_token * mine.tokens_per_second / peak
    if reference is not None:
        same = parity(mine, reference, dtype)
        verdict = "bitwise" if same.bitwise else "within noise"
        line |= {
            "ratio": mine.tokens_per_second / reference.tokens_per_second,
            "parity": verdict if same.holds else "differs",
            "loss_difference": same.loss,
            "gradient_norm_difference": same.gradient_norm,
        }
    return Line(**line)


def as_json(table: Table) -> dict[str, Any]:
    """Everything, each rank's loss of each step included; what is not a finite number is null."""
    rows = []
    for line, outcome in zip(table.lines, table.outcomes, strict=True):
        losses = None if outcome.figures is None else outcome.figures.losses
        rows.append({**asdict(line), "losses": losses})
    whole = {
        "setup": json.loads(json.dumps(asdict(table.setup), default=str)),
        "device": table.device,
        "peak_flops": table.peak_flops,
        "peak_source": table.peak_source,
        "mfu_note": table.mfu_note,
        "rows": rows,
    }
    finite: dict[str, Any] = _finite(whole)
    return finite


def write(table: Table, folder: Path) -> None:
    """`bench.csv` and, last and by rename, `bench.json`: where it is, the bench was whole."""
    names = [field.name for field in fields(Line)]
    try:
        with (folder / "bench.csv").open("w", newline="") as file:
            rows = csv.DictWriter(file, names)
            rows.writeheader()
            rows.writerows(asdict(line) for line in table.lines)
        beside = folder / "bench.json.partial"
        beside.write_text(json.dumps(as_json(table), indent=2, allow_nan=False) + "\n")
        beside.rename(folder / "bench.json")
    except OSError as error:
        raise TargetError(f"{folder}: the results cannot be written: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
