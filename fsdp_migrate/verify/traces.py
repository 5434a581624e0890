"""Reading the ranks' JSON lines back into a Trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp_migrate.verify.trial import (
    Clip,
    Final,
    Job,
    Model,
    Optimizer,
    Parameter,
    Part,
    RankTrace,
    Step,
    Trace,
    Trial,
)


def read_trace(job: Job, trial: Trial) -> Trace:
    folder = job.folder / trial.name
    ranks = [read_rank(folder / f"rank{rank}.jsonl", rank) for rank in range(job.world_size)]
    skipped = any(rank is None for rank in ranks)
    return Trace(trial.name, folder, tuple(rank for rank in ranks if rank is not None), skipped)


def read_rank(file: Path, rank: int) -> RankTrace | None:
    """What a rank recorded; None when it left the trial out. A rank that never began has failed."""
    if not file.exists():
        return RankTrace(rank, failure="never started")
    events = list(_events(file))
    if any(event.get("skipped") for event in events):
        return None
    return _rank(rank, events)


def _events(file: Path) -> Iterable[dict[str, Any]]:
    for line in file.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # the line a killed rank was writing


def _rank(rank: int, events: list[dict[str, Any]]) -> RankTrace:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    ends = by_kind.get("end", [])
    failures = [event["failure"] for event in by_kind.get("outcome", []) if "failure" in event]
    errors = [event["text"] for event in by_kind.get("error", [])]
    failure = None
    if not ends:
        failure = "; ".join([*errors, *failures]) or "ended without a word"
    return RankTrace(
        rank=rank,
        model=_models(by_kind.get("model", [])),
        optimizers=tuple(_optimizer(event) for event in by_kind.get("optimizer", [])),
        steps=tuple(_step(event) for event in by_kind.get("step", [])),
        final=_final(by_kind["final"][-1]) if "final" in by_kind else None,
        end=ends[-1]["why"] if ends else None,
        exact_calls=ends[-1]["exact_calls"] if ends else 0,
        exact_clips=ends[-1]["exact_clips"] if ends else 0,
        device=by_kind["begin"][0]["device"] if "begin" in by_kind else "",
        notes=tuple(event["text"] for event in by_kind.get("note", [])),
        failure=failure,
    )


def _models(events: list[dict[str, Any]]) -> Model | None:
    """A script may train several models: their names do not collide."""
    if not events:
        return None
    params: dict[str, Parameter] = {}
    buffers: dict[str, Mapping[str, Any]] = {}
    for event in events:
        params.update({name: _parameter(raw) for name, raw in event["params"].items()})
        buffers.update(event["buffers"])
    last = events[-1]
    return Model(last["units"], params, buffers, tuple(tuple(names) for names in last["ties"]))


def _parameter(raw: dict[str, Any]) -> Parameter:
    part = raw["part"] and _part(raw["part"])
    lists = {key: tuple(raw[key]) for key in ("shape", "degrees")}
    return Parameter(**{**raw, **lists, "part": part})


def _part(raw: dict[str, Any]) -> Part:
    return Part(
        raw["extent"],
        raw["numel"],
        raw["bits"],
        _float(raw["squares"]),
        tuple(map(_float, raw["sketch"])),
    )


def _optimizer(event: dict[str, Any]) -> Optimizer:
    return Optimizer(
        kind=event["kind"],
        groups=event["groups"],
        tensors=event["tensors"],
        strangers=event["strangers"],
        hyperparameters=event["hyperparameters"],
        state=_state(event["state"]),
        shared_state=tuple(event["shared_state"]),
    )


def _state(raw: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: _part(v) if isinstance(v, dict) else v for key, v in state.items()}
        for name, state in raw.items()
    }


def _step(event: dict[str, Any]) -> Step:
    return Step(
        losses=tuple(map(_float, event["losses"])),
        inputs=tuple(event["inputs"]),
        random=tuple(event["random"]),
        raw=_floats(event["raw"]),
        final=_floats(event["final"]),
        clips=tuple(Clip(_float(c["limit"]), _float(c["norm"])) for c in event["clips"]),
        rates=tuple(tuple(map(_float, rates)) for rates in event["rates"]),
        counts=tuple(event["counts"]),
        scale=_float(event["scale"]),
        seconds=None if event["seconds"] is None else _float(event["seconds"]),
        peak=event["peak"],
    )


def _final(event: dict[str, Any]) -> Final:
    return Final(
        params={name: _part(raw) for name, raw in event["params"].items()},
        buffers=event["buffers"],
        state=tuple(_state(state) for state in event["state"]),
    )


def _floats(raw: dict[str, str | None]) -> dict[str, float | None]:
    return {name: None if value is None else _float(value) for name, value in raw.items()}


def _float(text: str) -> float:
    return float.fromhex(text)
