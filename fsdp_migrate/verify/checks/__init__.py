"""
The checks of a pair of runs, in the order they are made; the first finding ends the judgement.

Each module has `check(pair) -> Finding | None`, pure arithmetic on the two traces.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp_migrate.verify.checks import data, first_step, mechanism, start
from fsdp_migrate.verify.verdict import Finding, Pair

Check = Callable[[Pair], Finding | None]

# What must hold before a comparison of the training itself means anything.
FOUNDATIONS: tuple[tuple[str, Check], ...] = (
    ("mechanism", mechanism.check),
    ("start", start.check),
    ("data", data.check),
    ("step 0", first_step.check),
)
