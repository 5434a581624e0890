"""
One torch.save file with everything in it: FULL_STATE_DICT, `{"model": ..., "optim": ...}`.

The way back too: `optim` is what `FSDP.optim_state_dict` gives under FULL_STATE_DICT (state and
param groups by name), which `FSDP.optim_state_dict_to_load` and `set_optimizer_state_dict` take.
Tied parameters share a storage, as `torch.save(model.state_dict())` has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from fsdp_migrate.checkpoint.index import Index, Optimizer
from fsdp_migrate.checkpoint.plan import OutputFile, Plan
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.checkpoint.writers.parameter_dtype import Decision, decide
from fsdp_migrate.checkpoint.writers.pickling import Call, dumps
from fsdp_migrate.checkpoint.writers.tensor_pickle import (
    Storages,
    is_plain_step,
    plain_step_note,
)
from fsdp_migrate.checkpoint.writers.torch_archive import parts_of

NAME = "torch"


def plan(index: Index, options: TargetOptions) -> Plan:
    """Lay out the file; its name is the caller's."""
    options.only(NAME)
    decision = decide(index, options)
    storages = Storages()
    content: dict[str, object] = {}
    if index.model:
        content["model"] = _model(index, decision, storages)
    notes = decision.notes
    if index.optimizer is not None:
        content["optim"] = _optimizer(index.optimizer, storages)
        notes += plain_step_note(index.optimizer)
    left_out = _add_extras(index, content, storages)
    parts, size = parts_of(dumps(content), storages.payloads)
    file = OutputFile(PurePosixPath("checkpoint.pt"), size, tuple(parts))
    return Plan((file,), single_file=True, notes=(*notes, *extras_note(left_out)))


def extras_note(paths: Iterable[tuple[Any, ...]]) -> tuple[str, ...]:
    """What lay beside model and optimizer and has no place in the target."""
    names = dict.fromkeys(str(path[0]) for path in paths)
    return (f"left out (neither model nor optimizer): {', '.join(names)}",) if names else ()


def _add_extras(index: Index, content: dict[str, object], storages: Storages) -> list[Any]:
    """Put what is beside model and optimizer where it was; returns the paths that have no place."""
    left_out = []
    for path, value in index.extras.items():
        # A list that was taken apart because of the tensors in it is not put together again.
        place: Any = content if all(type(key) is str for key in path) else None
        for key in path[:-1]:
            place = place.setdefault(key, {}) if type(place) is dict else None
        if type(place) is not dict or path[-1] in place:
            left_out.append(path)
        else:
            place[path[-1]] = storages.value(value)
    return left_out


def _model(index: Index, decision: Decision, storages: Storages) -> OrderedDict[str, Call]:
    model: OrderedDict[str, Call] = OrderedDict()
    written: dict[object, Call] = {}
    for name, tensor in index.model.items():
        dtype = decision.dtypes[name]
        key = (tensor.pieces, tensor.shape, tensor.dtype, dtype) if tensor.pieces else name
        if key not in written:
            written[key] = storages.whole(tensor, dtype)
        model[name] = written[key]
    return model


def _optimizer(optimizer: Optimizer, storages: Storages) -> dict[str, object]:
    state = {
        fqn: {
            name: storages.step(value)  # type: ignore[arg-type]
            if is_plain_step(name, value)
            else storages.value(value)
            for name, value in entries.items()
        }
        for fqn, entries in optimizer.state.items()
    }
    groups = [
        {**{key: storages.value(value) for key, value in group.options.items()}}
        | {"params": list(group.params)}
        for group in optimizer.groups
    ]
    return {"state": state, "param_groups": groups}
