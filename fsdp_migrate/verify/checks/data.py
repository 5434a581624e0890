"""Does each rank of both runs read the same batches, step by step?"""

from __future__ import annotations

from fsdp_migrate.verify.trial import RankTrace
from fsdp_migrate.verify.verdict import Finding, Pair


def check(pair: Pair) -> Finding | None:
    befores, afters = pair.before.ranks, pair.after.ranks
    if len(befores) != len(afters):
        return None  # ranks have no counterparts; the notes say so
    for index in range(min(pair.before.steps, pair.after.steps)):
        for before, after in zip(befores, afters, strict=True):
            was, now = before.steps[index].inputs, after.steps[index].inputs
            if len(was) != len(now):
                return Finding(
                    f"rank {before.rank} runs the model {len(was)} times in step {index} before, "
                    f"{len(now)} times after",
                    step=index,
                    rank=before.rank,
                )
            if was != now:
                return Finding(
                    f"rank {before.rank} is given other inputs in step {index}"
                    f"{_whose(befores, before.rank, index, now)}",
                    step=index,
                    rank=before.rank,
                )
    return None


def _whose(befores: tuple[RankTrace, ...], rank: int, index: int, now: tuple[str, ...]) -> str:
    for other in befores:
        if other.rank != rank and other.steps[index].inputs == now:
            return f": it reads rank {other.rank}'s data"
        for later, step in enumerate(other.steps):
            if later != index and step.inputs == now:
                return f": it reads what rank {other.rank} read in step {later} of the first run"
    return ""
