"""
One torch.save file with everything in it: FULL_STATE_DICT, `{"model": ..., "optim": ...}`.

The way back too: `optim` is what `FSDP.optim_state_dict` gives under FULL_STATE_DICT (state and
param groups by name), which `FSDP.optim_state_dict_to_load` and `set_optimizer_state_dict` take.
Tied parameters share a storage, as `torch.save(model.state_dict())` has it.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import PurePosixPath

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
    decision = decide(index, options)
    storages = Storages()
    content: dict[str, object] = {"model": _model(index, decision, storages)}
    notes = decision.notes
    if index.optimizer is not None:
        content["optim"] = _optimizer(index.optimizer, storages)
        notes += plain_step_note(index.optimizer)
    parts, size = parts_of(dumps(content), storages.payloads)
    file = OutputFile(PurePosixPath("checkpoint.pt"), size, tuple(parts))
    return Plan((file,), single_file=True, notes=(*notes, *extras_note(index)))


def extras_note(index: Index) -> tuple[str, ...]:
    """What lay beside model and optimizer and is not written."""
    if not index.extras:
        return ()
    names = sorted({path.partition(".")[0] for path in index.extras})
    return (f"left out (neither model nor optimizer): {', '.join(names)}",)


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
