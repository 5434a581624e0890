from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import is_state_dict_call, model_of
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.wrap import Undecided


class StateDictContext(Rule):
    """
    `with FSDP.state_dict_type(...)` goes; each call in it says for itself what it wants.

    The block is unwrapped where every state dict call in it is understood. Where the block
    calls something that may ask for a state dict out of sight, it is left.
    """

    name = "state-dict-context"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullStateDictConfig, StateDictType
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
                with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                    state = model.state_dict()
                if rank == 0:
                    torch.save(state, path)
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import (
                    StateDictOptions,
                    get_model_state_dict,
                )

                state = get_model_state_dict(
                    model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
                )
                if rank == 0:
                    torch.save(state, path)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses(api.FSDP, "state_dict_type")):
            try:
                self._context(file, use)
            except Undecided as reason:
                if use.call is not None:
                    file.modes.left.add(id(use.call))
                    file.keep_values(use.call)
                file.todo(use.node, use.api, str(reason))

    def _context(self, file: File, use: Use) -> None:
        item = file.tree.parent(use.call) if use.call is not None else None
        choice = item if isinstance(item, cst.IfExp) and _or_nothing(file, item) else None
        item = file.tree.parent(choice) if choice is not None else item
        block = file.tree.parent(item) if item is not None else None
        if (
            use.call is None
            or not isinstance(item, cst.WithItem)
            or not isinstance(block, cst.With)
        ):
            raise Undecided("only a `with` block of its own can be unwrapped")
        if item.asname is not None:
            raise Undecided("the value bound by `as` is FSDP1's settings object")
        file.modes.read(use.call)
        self._check_body(file, block)
        for node in walk(use.call):
            if node is not use.node and not file.tree.inside(node, use.node):
                file.values.consume(node)
                file.cover_below(node)
        file.unwrap(block, item)
        if choice is not None:
            file.values.consume(choice)
            message = "the calls in the block do the same without FSDP, on rank 0 if offloaded"
            file.differs(use.node, use.api, message)
            return
        file.rewritten(use.node, use.api, "each call in the block names its own kind")

    @staticmethod
    def _check_body(file: File, block: cst.With) -> None:
        """Raise Undecided unless the block's state dict calls are all in sight."""
        found = False
        item = file.modes.entered(block)
        assert item is not None
        model = model_of(item)
        text = file.tree.code(model) if model is not None else ""
        for node in walk(block.body):
            if not isinstance(node, cst.Call):
                continue
            known = file.api(node.func)
            if is_state_dict_call(file, node) or (known and "optim_state_dict" in str(known)):
                found = True
            elif _may_ask(file, node, text):
                raise Undecided(
                    f"{file.tree.code(node.func)} may take a state dict out of sight;"
                    " call get_model_state_dict and pass its result"
                )
        if not found:
            raise Undecided("no state dict call of this model is in the block")


_HARMLESS = {"print", "len", "isinstance", "str", "type", "id", "unwrap_model"}


def _may_ask(file: File, call: cst.Call, model: str) -> bool:
    """Whether a call is handed the model and might take its state dict."""
    if file.qualified(call.func) or file.tree.code(call.func) in _HARMLESS:
        return False
    passed = {file.tree.code(arg.value) for arg in call.args}
    keywords = {arg.keyword.value for arg in call.args if arg.keyword}
    if isinstance(call.func, cst.Attribute) and file.tree.code(call.func.value) == model:
        return call.func.attr.value in ("save_pretrained",) and "state_dict" not in keywords
    return model in passed and "state_dict" not in keywords


def _or_nothing(file: File, choice: cst.IfExp) -> bool:
    """`state_dict_type(...) if cond else nullcontext()`: the calls inside suit both."""
    sides = (choice.body, choice.orelse)
    return any(file.is_call(side, "contextlib.nullcontext") for side in sides)
