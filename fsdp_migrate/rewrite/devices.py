"""Where a model is to live, as far as the arguments of its FSDP call say so."""

from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted, string_value
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import Translation


def kind(file: File, value: cst.BaseExpression | None) -> str | None:
    """ "cpu" or "cuda" of a device_id; None when only the run can tell."""
    if value is None or is_none(value):
        return "cuda"
    value = file.values.only(value)
    if isinstance(value, cst.Integer):
        return "cuda"
    if isinstance(value, cst.Call):
        name = file.qualified(value.func)
        if name == "torch.cuda.current_device":
            return "cuda"
        if name == "torch.device" and value.args:
            first = value.args[0].value
            text = string_value(first)
            if isinstance(first, cst.FormattedString):
                text = file.tree.code(first).lstrip("fF\"'")
            known = text.split(":")[0] if text is not None else None
            return known if known in ("cpu", "cuda") else None
        if file.tree.code(value.func) in ("int", "get_rank", "dist.get_rank", "get_local_rank"):
            return "cuda"
    text = (dotted(value) or "").lower()
    return "cuda" if "rank" in text or "gpu" in text else None


def device_type(file: File, translation: Translation) -> str:
    """The text of the device type for a mesh."""
    value = translation.value("device_id")
    known = kind(file, value)
    if known is not None:
        return f'"{known}"'
    assert value is not None
    if all(file.is_call(leaf, "torch.device") for leaf in file.values.leaves(value)):
        return f"{file.render(value)}.type"
    return f'getattr({file.render(value)}, "type", "cuda")'  # an int means a CUDA device


def local_size(file: File, translation: Translation, at: cst.CSTNode) -> str:
    """The text of the number of ranks on a node, which FSDP1 took to be the device count."""
    if kind(file, translation.value("device_id")) == "cpu":
        return "1"
    return f"{file.name('torch.cuda.device_count', at)}()"


def cpu_mesh(file: File, at: cst.CSTNode) -> str:
    """The text of a 1-D mesh of CPU ranks; without one a machine's GPUs would be used."""
    init = file.name("torch.distributed.device_mesh.init_device_mesh", at)
    world = file.name("torch.distributed.get_world_size", at)
    return f'{init}("cpu", ({world}(),))'
