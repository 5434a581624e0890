from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import (
    STATE_DICT_HOME,
    Mode,
    arguments,
    full_options,
    is_state_dict_call,
    options,
)
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import truth


class StateDictCall(Rule):
    """
    `state_dict()` and `load_state_dict()` of a model become `get_`/`set_model_state_dict`.

    The options say what FSDP1 had as state: `full_state_dict=True` where the kind was FULL (also
    FSDP1's default), `cpu_offload=True` for full dicts that only rank 0 gets. Sharded dicts
    need no options. `set_model_state_dict` turns the entries of the dict it is given into
    DTensors, so a dict that is used again is passed as a copy.
    """

    name = "state-dict-call"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import StateDictType

                with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                    state = {"model": model.state_dict()}
                    dcp.load(state, checkpoint_id=path)
                    model.load_state_dict(state["model"])
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import (
                    get_model_state_dict,
                    set_model_state_dict,
                )

                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=path)
                set_model_state_dict(model, state["model"])
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for call in file.tree.all(cst.Call):
            if not is_state_dict_call(file, call) or not file.open(call):
                continue
            assert isinstance(call.func, cst.Attribute)
            what = f"{file.tree.code(call.func.value)}.{call.func.attr.value}"
            try:
                mode = file.modes.at(call)
                saves = call.func.attr.value == "state_dict"
                state, message = (self._get if saves else self._set)(file, call, call.func, mode)
            except Undecided as reason:
                file.todo(call, what, str(reason))
                continue
            (file.rewritten if state == "rewritten" else file.differs)(call, what, message)

    def _get(
        self, file: File, call: cst.Call, func: cst.Attribute, mode: Mode
    ) -> tuple[State, str]:
        if call.args:
            raise Undecided("state_dict() with arguments has no counterpart")
        model = func.value
        fields, on_cpu, difference = full_options(file, mode.kind, mode.model, whole_value=True)
        message = "a full state dict" if mode.kind == "FULL" else "a sharded state dict of DTensors"
        if mode.kind == "LOCAL":
            difference = "sharded DTensors; files of FSDP1's local kind do not load"

        def text() -> str:
            get = file.name(f"{STATE_DICT_HOME}.get_model_state_dict", call)
            made = file.call(get, [file.render(model), options(file, call, **fields)], call)
            if on_cpu is None:
                return made
            value = "value.cpu()" if on_cpu == "True" else f"value.cpu() if {on_cpu} else value"
            return f"{{name: {value} for name, value in {made}.items()}}"

        file.edits.replace(call, text)
        return "differs" if difference else "rewritten", difference or message

    def _set(
        self, file: File, call: cst.Call, func: cst.Attribute, mode: Mode
    ) -> tuple[State, str]:
        given = arguments(call, ("state_dict", "strict", "assign"))
        if "state_dict" not in given or "assign" in given:
            raise Undecided("load_state_dict with assign= has no counterpart")
        fields = {"full_state_dict": "True"} if mode.kind == "FULL" else {}
        strict = given.get("strict")
        if strict is not None and truth(strict) is not True:
            fields["strict"] = file.tree.code(strict)
        source, model = given["state_dict"], func.value

        def text() -> str:
            put = file.name(f"{STATE_DICT_HOME}.set_model_state_dict", call)
            value = file.render(source)
            if mode.kind == "FULL" and used_again(file, source, call):
                value = f"dict({value})"
            made = [file.render(model), value, options(file, call, **fields)]
            return file.call(put, made, call)

        file.edits.replace(call, text)
        return "rewritten", "set_model_state_dict with the same kind of dict"


def used_again(file: File, value: cst.BaseExpression, at: cst.CSTNode) -> bool:
    """Whether a variable is read once more after `at`."""
    if not isinstance(value, cst.Name):
        return False
    later = file.values.uses(value.value, value)
    return any(file.tree.before(at, use) and not file.tree.inside(use, at) for use in later)
