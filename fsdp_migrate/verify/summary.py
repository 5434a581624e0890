"""A pair's steps in a few numbers, for the terminal and the report."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from fsdp_migrate.verify.verdict import Point, Series


@dataclass(frozen=True)
class Summary:
    """Seconds are medians over the steps after the first; None where no step was timed."""

    name: str
    steps: int
    equal: int  # steps whose losses are the same bits
    worst: Point | None  # the step with the largest difference; None without steps
    outside: tuple[int, ...]  # steps whose difference is more than what was allowed
    seconds_before: float | None
    seconds_after: float | None


def summarise(series: Series) -> Summary:
    points = series.points
    return Summary(
        name=series.name,
        steps=len(points),
        equal=sum(point.difference == 0 for point in points),
        worst=max(points, key=_size, default=None),
        outside=tuple(point.step for point in points if is_outside(point)),
        seconds_before=median([point.seconds_before for point in points[1:]]),
        seconds_after=median([point.seconds_after for point in points[1:]]),
    )


def is_outside(point: Point) -> bool:
    """Not inside: a difference that is not a number is outside of any envelope."""
    return point.envelope is not None and not point.difference <= point.envelope


def median(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return statistics.median(known) if known else None


def _size(point: Point) -> float:
    return math.inf if math.isnan(point.difference) else point.difference
