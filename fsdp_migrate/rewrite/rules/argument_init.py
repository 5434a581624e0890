from __future__ import annotations

import re

import libcst as cst

from fsdp_migrate.rewrite import snippets
from fsdp_migrate.rewrite.devices import device_type
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.rules.cpu_offload import offloads
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.units import only_return
from fsdp_migrate.rewrite.values import argument as argument_of
from fsdp_migrate.rewrite.values import is_none, truth
from fsdp_migrate.rewrite.wrap import Argument, Translation, Undecided

_META = re.compile(r"""device\(["']meta["']|device=["']meta["']|init_empty_weights|deferred_init""")


class InitArgument(ArgumentRule):
    """
    `sync_module_states=` and `param_init_fn=`: how the sharded model gets its first weights.

    Rank 0's weights are kept aside before sharding and given to every rank after it; on ranks
    that start on the meta device, memory is made first. A `param_init_fn` that really
    initialises runs on each unit just before it is sharded, in FSDP1's order, so the same seed
    gives the same weights.
    """

    name = "initialisation"
    arguments = ("sync_module_states", "param_init_fn")
    examples = (
        Example(
            before="""
                import torch.distributed as dist
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, sync_module_states=False, param_init_fn=None)
            """,
            after="""
                import torch.distributed as dist
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value = argument.value
        if argument.name == "sync_module_states":
            if truth(value) is False or is_none(value):
                return "rewritten", "dropped: nothing is synchronised"
            return self._sync(value, into)
        if is_none(value):
            return "rewritten", "dropped: nothing is initialised"
        return self._init(value, into)

    def _sync(self, value: cst.BaseExpression, translation: Translation) -> tuple[State, str]:
        file, at = translation.file, translation.at
        group = translation.value("process_group")
        if group is not None and not is_none(group):
            raise Undecided("sync_module_states with a process group: from which rank?")
        always = truth(value) is True

        def keep(model: str) -> str:
            name = file.needs.local("full_state", at, avoid=model)
            rank = file.name("torch.distributed.get_rank", at)
            test = f"{rank}() == 0" if always else f"{_closed(file, value)} and {rank}() == 0"
            return f"{name} = {model}.state_dict() if {test} else {{}}"

        def give(model: str) -> str:
            helper = snippets.load_from_rank0(file)
            name = file.needs.local("full_state", at, avoid=model)
            device = self._device(translation, file)
            line = file.call(helper, [model, name, device], at)
            if always:
                return line
            inner = "\n".join(f"    {text}" for text in line.split("\n"))
            return f"if {file.render(value)}:\n{inner}"

        given = translation.value("param_init_fn")
        translation.synced = always and (given is None or is_none(given))
        translation.before.insert(0, keep)
        translation.after.insert(0, give)
        return "rewritten", "rank 0's weights are given to every rank after sharding"

    @staticmethod
    def _init(value: cst.BaseExpression, translation: Translation) -> tuple[State, str]:
        file = translation.file
        synced = translation.value("sync_module_states")
        is_synced = synced is not None and truth(synced) is not False
        if is_synced and _only_makes_memory(file, value):
            return "rewritten", "meta tensors get memory after sharding, then rank 0's values"
        translation.init = lambda: file.render(value)
        return "rewritten", "run on each unit before it is sharded, in FSDP1's order"

    @staticmethod
    def _device(translation: Translation, file: File) -> str:
        """The device on which meta tensors become real, or "" when none are."""
        value = translation.value("param_init_fn")
        if value is None or is_none(value) or not _only_makes_memory(file, value):
            return ""
        call = _to_empty_call(file, value)
        given = argument_of(call, "device", 0)
        device = file.render(given.value) if given else '"cuda"'
        return _on_cpu_if_offloaded(device, translation, file)


def _to_empty_call(file: File, value: cst.BaseExpression) -> cst.Call:
    """The `to_empty(...)` of a function that only makes memory."""
    if isinstance(value, cst.IfExp):
        value = value.orelse if is_none(value.body) else value.body
    plain = file.values.only(value)
    found = file.values.bindings(plain)
    holder = plain if isinstance(plain, cst.Lambda) else found[0].definition
    assert holder is not None
    return next(node for node in walk(holder) if isinstance(node, cst.Call) and _is_to_empty(node))


def _on_cpu_if_offloaded(device: str, translation: Translation, file: File) -> str:
    offload = translation.value("cpu_offload")
    if offload is None or is_none(offload):
        return device
    plain = file.values.only(offload)
    if isinstance(plain, cst.IfExp) and is_none(plain.orelse):
        return f'"cpu" if {file.tree.code(plain.test)} else {device}'
    if isinstance(plain, cst.Call):
        known = offloads(plain)
        if known is not None:
            return '"cpu"' if known else device
        given = argument_of(plain, "offload_params", 0)
        assert given is not None
        return f'"cpu" if {file.tree.code(given.value)} else {device}'
    return device


def _closed(file: File, value: cst.BaseExpression) -> str:
    text = file.render(value)
    loose = isinstance(value, cst.BooleanOperation | cst.IfExp | cst.Lambda)
    return f"({text})" if loose else text


def _is_to_empty(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "to_empty"
    )


def _only_makes_memory(file: File, value: cst.BaseExpression) -> bool:
    """Whether a param_init_fn does nothing but `module.to_empty(...)`."""
    if isinstance(value, cst.IfExp):
        sides = [side for side in (value.body, value.orelse) if not is_none(side)]
        return all(_only_makes_memory(file, side) for side in sides)
    plain = file.values.only(value)
    if isinstance(plain, cst.Lambda):
        return _is_to_empty(plain.body)
    found = file.values.bindings(plain)
    if len(found) != 1 or not isinstance(found[0].definition, cst.FunctionDef):
        return False
    function = found[0].definition
    returned = only_return(function)
    if returned is not None:
        return _is_to_empty(returned)
    statements = [node for node in walk(function.body) if isinstance(node, cst.Expr)]
    calls = [node.value for node in statements if not isinstance(node.value, cst.SimpleString)]
    others = [
        node for node in walk(function.body) if isinstance(node, cst.Assign | cst.For | cst.If)
    ]
    return len(calls) == 1 and _is_to_empty(calls[0]) and not others


def initialise_meta(translation: Translation) -> None:
    """
    A model on the meta device without a `param_init_fn`: FSDP1 called `reset_parameters()`.

    Only where the code around the call speaks of the meta device; a model with real weights is
    not touched by the helper.
    """
    file, at = translation.file, translation.at
    given = translation.value("param_init_fn")
    synced = translation.value("sync_module_states")
    if (given is not None and not is_none(given)) or translation.init is not None:
        return
    if synced is not None and truth(synced) is not False:
        return
    scope = file.tree.function(at) or file.tree.module
    if _META.search(file.tree.module.code_for_node(scope)) is None:
        return
    device = translation.value("device_id")

    def text() -> str:
        helper = snippets.reset_module(file)
        where = file.render(device) if device is not None else device_type(file, translation)
        return f"lambda module: {helper}(module, {where})"

    translation.init = text
