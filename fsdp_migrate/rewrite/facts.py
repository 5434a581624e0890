"""What one file can tell the others of its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import libcst as cst

from fsdp_migrate.rewrite import api, hints
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.project import Facts, module_of
from fsdp_migrate.rewrite.state_dict_modes import Config, Mode
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided


def collect(file: File) -> Facts:
    top = file.names.top
    return Facts(
        path=file.path,
        module=module_of(Path(file.path)),
        bound={
            name: found[0].qualified for name, found in top.bindings.items() if found[0].qualified
        },
        stars=tuple(module for module, _ in top.stars),
        imported=frozenset(file.names.imported()),
        sets_device=file.sets_device,
        has_fsdp=file.has_fsdp,
        returns=frozenset(_returns(file)),
        passed=frozenset(_passed(file)),
        attributes=frozenset(_attributes(file)),
        checkpointers=frozenset(_checkpointers(file)),
        sticky=tuple(_sticky(file)),
        configs=dict(_configs(file)),
        buffers=hints.holds_buffers(file.text),
        model_homes=hints.model_homes(file.text),
        inputs=hints.forward_inputs(file.text),
    )


def of_text(path: str, text: str) -> Facts:
    """The facts of a file with nothing to rewrite, such as a model's."""
    return Facts(
        path=path,
        module=module_of(Path(path)),
        buffers=hints.holds_buffers(text),
        inputs=hints.forward_inputs(text),
    )


def _returns(file: File) -> Iterator[tuple[str, int | None]]:
    for node in file.tree.all(cst.Return):
        function = file.tree.function(node)
        if node.value is None or function is None:
            continue
        if isinstance(node.value, cst.Tuple):
            for index, element in enumerate(node.value.elements):
                if file.models.is_model(element.value):
                    yield function.name.value, index
        elif file.models.is_model(node.value):
            yield function.name.value, None


def _passed(file: File) -> Iterator[tuple[str, int | str]]:
    for call in file.tree.all(cst.Call):
        text = dotted(call.func)
        if text is None:
            continue
        for position, arg in enumerate(call.args):
            if not arg.star and dotted(arg.value) and file.models.is_model(arg.value):
                name = text.split(".")[-1]
                yield name, arg.keyword.value if arg.keyword else position


def _attributes(file: File) -> Iterator[str]:
    for node in file.tree.all(cst.AssignTarget):
        target = node.target
        if isinstance(target, cst.Attribute) and file.models.is_model(target):
            yield target.attr.value


def _checkpointers(file: File) -> Iterator[str]:
    if "apply_activation_checkpointing" not in file.text:
        return
    for function in file.tree.all(cst.FunctionDef):
        if not function.params.params:
            continue
        first = function.params.params[0].name.value
        for node in walk(function.body):
            if not isinstance(node, cst.Call) or not node.args:
                continue
            applies = str(file.qualified(node.func)).endswith(".apply_activation_checkpointing")
            if applies and dotted(node.args[0].value) == first:
                yield function.name.value


def _sticky(file: File) -> Iterator[Mode]:
    for use in file.all_uses:
        if use.api == api.Api(api.FSDP, "set_state_dict_type") and use.call is not None:
            try:
                mode = file.modes.read(use.call)
            except Undecided:
                yield Mode("UNKNOWN", Config(), Config())
                continue
            yield Mode(mode.kind, _bare(mode.model), _bare(mode.optim))


def _configs(file: File) -> Iterator[tuple[str, Config]]:
    for name, bindings in file.names.top.bindings.items():
        value = bindings[0].value
        if len(bindings) != 1 or not isinstance(value, cst.Call):
            continue
        found = file.api(value.func)
        if found is not None and found.name.endswith("StateDictConfig"):
            try:
                config = file.modes.config(value, Config())
            except Undecided:
                continue
            if config.offload is not None and config.rank0 is not None:
                yield name, _bare(config)


def _bare(config: Config) -> Config:
    return replace(config, offload_value=None, rank0_value=None)
