from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import (
    STATE_DICT_HOME,
    Config,
    Mode,
    arguments,
    full_options,
    options,
)
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.values import is_none, truth
from fsdp_migrate.rewrite.wrap import Make, Undecided


@dataclass(frozen=True, slots=True)
class Form:
    """
    One of FSDP1's class methods for optimizer state: its parameters, and the kind of state it
    makes or takes where that is not the mode in force. `broadcast`: rank 0's dict serves all.
    """

    parameters: tuple[str, ...]
    mode: Mode | None = None
    broadcast: bool = False


_SHARDED = Mode("SHARDED", Config(), Config())
_FULL = Mode("FULL", Config(), Config(offload=True, rank0=True))
_FULL_ALL = Mode("FULL", Config(), Config())

SAVING = {
    "optim_state_dict": Form(("model", "optim", "optim_state_dict", "group")),
    "full_optim_state_dict": Form(("model", "optim", "optim_input", "rank0_only", "group"), _FULL),
    "sharded_optim_state_dict": Form(("model", "optim", "group"), _SHARDED),
}
LOADING = {
    "optim_state_dict_to_load": Form(
        ("model", "optim", "optim_state_dict", "is_named_optimizer", "load_directly", "group")
    ),
    "scatter_full_optim_state_dict": Form(
        ("optim_state_dict", "model", "optim_input", "optim", "group"), _FULL, broadcast=True
    ),
    "shard_full_optim_state_dict": Form(
        ("optim_state_dict", "model", "optim_input", "optim"), _FULL_ALL
    ),
    "flatten_sharded_optim_state_dict": Form(("optim_state_dict", "model", "optim"), _SHARDED),
}
_OLD_ORDER = ("optim_state_dict", "model", "optim")


class OptimizerState(Rule):
    """
    FSDP's optimizer state methods become `get_`/`set_optimizer_state_dict`.

    Loading took two steps in FSDP1 (make the dict fit, load it) and takes one now. Both argument
    orders of `optim_state_dict_to_load` are read by what the arguments are; the legacy forms
    (full, sharded, scattered) say their kind by their name.
    """

    name = "optimizer-state"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                state = FSDP.optim_state_dict(model, optimizer)
                flat = FSDP.optim_state_dict_to_load(model, optimizer, state)
                optimizer.load_state_dict(flat)
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import (
                    StateDictOptions,
                    get_optimizer_state_dict,
                    set_optimizer_state_dict,
                )

                state = get_optimizer_state_dict(
                    model, optimizer, options=StateDictOptions(full_state_dict=True)
                )
                set_optimizer_state_dict(
                    model, optimizer, state, options=StateDictOptions(full_state_dict=True)
                )
            """,
        ),
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                optimizer.load_state_dict(FSDP.scatter_full_optim_state_dict(state, model))
            """,
            after="""
                from torch.distributed.checkpoint.state_dict import (
                    StateDictOptions,
                    set_optimizer_state_dict,
                )

                set_optimizer_state_dict(
                    model,
                    optimizer,
                    state,
                    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
                )
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.all_uses):
            member = use.api.member
            if use.api.name != api.FSDP or member is None or not file.open(use.node):
                continue
            if member not in SAVING and member not in LOADING:
                continue
            try:
                if use.call is None:
                    raise Undecided("the method is passed on as a value")
                decided = self._save if member in SAVING else self._load
                state, message = decided(file, use, use.call)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            (file.rewritten if state == "rewritten" else file.differs)(use.node, use.api, message)

    # --- saving --------------------------------------------------------------------------

    def _save(self, file: File, use: Use, call: cst.Call) -> tuple[State, str]:
        form = SAVING[str(use.api.member)]
        given = arguments(call, form.parameters)
        for name in ("optim_state_dict", "group"):
            if name in given and not is_none(given[name]):
                raise Undecided(f"{name}= has no counterpart")
        if "model" not in given or "optim" not in given:
            raise Undecided("which model and optimizer are meant cannot be seen")
        mode = form.mode or file.modes.at(call)
        if "rank0_only" in given:
            rank0 = truth(given["rank0_only"])
            mode = Mode("FULL", Config(), Config(offload=True, rank0=rank0))
        fields, after, message = full_options(file, mode.kind, mode.optim, whole_value=False)
        if after is not None:
            message = "whole on every rank's device, where FSDP1 put it on the CPU"

        def text() -> str:
            get = file.name(f"{STATE_DICT_HOME}.get_optimizer_state_dict", call)
            passed = [file.render(given["model"]), file.render(given["optim"])]
            return file.call(get, [*passed, options(file, call, **fields)], call)

        file.edits.replace(call, text)
        return "differs" if message else "rewritten", message or "the same keys and values"

    # --- loading -------------------------------------------------------------------------

    def _load(self, file: File, use: Use, call: cst.Call) -> tuple[State, str]:
        form = LOADING[str(use.api.member)]
        given = self._given(file, use, call, form)
        if "group" in given and not is_none(given["group"]):
            raise Undecided("group= has no counterpart")
        if truth(given.get("is_named_optimizer")):
            raise Undecided("is_named_optimizer=True has no counterpart")
        mode = form.mode or file.modes.at(call)
        fields = {"full_state_dict": "True"} if mode.kind == "FULL" else {}
        if mode.kind == "FULL" and (form.broadcast or mode.optim.rank0):
            fields["broadcast_from_rank0"] = "True"
        outer, statement = self._loader(file, call, given)
        optimizer = given.get("optim")
        if outer is not None:
            assert isinstance(outer.func, cst.Attribute)
            optimizer = optimizer or outer.func.value
        if optimizer is None or "model" not in given or "optim_state_dict" not in given:
            raise Undecided("which model, optimizer and state are meant cannot be seen")
        loaded, source = optimizer, given["optim_state_dict"]

        def text() -> str:
            put = file.name(f"{STATE_DICT_HOME}.set_optimizer_state_dict", call)
            value = file.render(source)
            if "broadcast_from_rank0" in fields and _may_be_none(file, source):
                value = f"{value} or {{}}"
            passed = [file.render(given["model"]), file.render(loaded), value]
            return file.call(put, [*passed, options(file, call, **fields)], call)

        self._replace(file, call, outer, statement, text)
        return "rewritten", "loaded in one step"

    @staticmethod
    def _given(file: File, use: Use, call: cst.Call, form: Form) -> dict[str, cst.BaseExpression]:
        plain = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
        if use.api.member == "optim_state_dict_to_load" and len(plain) >= 2:
            first, second = (file.models.is_model(value) for value in plain[:2])
            if not first and not second:
                first, second = ("model" in file.tree.code(value) for value in plain[:2])
            if first == second:
                raise Undecided("is the model the first argument (torch 2.1 on) or the second?")
            if second:
                return arguments(call, _OLD_ORDER)
        return arguments(call, form.parameters)

    @staticmethod
    def _loader(
        file: File, call: cst.Call, given: dict[str, cst.BaseExpression]
    ) -> tuple[cst.Call | None, cst.CSTNode | None]:
        """The `optimizer.load_state_dict(...)` call that takes the result, and its statement."""
        above = file.tree.parent(call)
        outer = file.tree.parent(above) if isinstance(above, cst.Arg) else None
        if isinstance(outer, cst.Call) and _is_load(outer):
            return outer, None
        statement = file.tree.statement(call)
        if isinstance(statement, cst.Expr) and truth(given.get("load_directly")):
            return None, None
        if not isinstance(statement, cst.Assign) or statement.value is not call:
            raise Undecided("the result must go straight into optimizer.load_state_dict")
        target = dotted(statement.targets[0].target)
        if target is None or len(statement.targets) != 1:
            raise Undecided("the result must go straight into optimizer.load_state_dict")
        found = _load_below(file, statement, target)
        if found is not None:
            return found
        raise Undecided("where the result is loaded cannot be seen; load it in the same block")

    @staticmethod
    def _replace(
        file: File,
        call: cst.Call,
        outer: cst.Call | None,
        statement: cst.CSTNode | None,
        text: Make,
    ) -> None:
        if statement is None:
            file.edits.replace(outer or call, text)
            if outer is not None:
                file.covered(outer)
            return
        # Where branches make the dict, each loads its own, and the one load below them goes.
        apart = file.tree.block(statement) != file.tree.block(file.tree.statement(call))
        kept, gone = file.tree.statement(call), statement
        if not apart:
            kept, gone = gone, kept
        file.edits.replace_statement(kept, lambda: [text()])
        if not file.edits.is_rebuilt(gone):
            file.edits.remove(gone)
        file.covered(outer)  # type: ignore[arg-type]


def _load_below(
    file: File, statement: cst.CSTNode, target: str
) -> tuple[cst.Call, cst.CSTNode] | None:
    """The statement that loads what `statement` made: below it, or below the `if` around it."""
    while True:
        block = file.tree.block(statement)
        for later in block[block.index(statement) + 1 :]:
            for node in walk(later):
                if not isinstance(node, cst.Call) or not _is_load(node) or not node.args:
                    continue
                if dotted(node.args[0].value) == target and isinstance(later, cst.Expr):
                    return node, later
        around = file.tree.nearest(statement, cst.If)
        if around is None or file.tree.function(around) is not file.tree.function(statement):
            return None
        statement = file.edits.anchor(around)


def _is_load(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "load_state_dict"


def _may_be_none(file: File, value: cst.BaseExpression) -> bool:
    return any(is_none(leaf) for leaf in file.values.leaves(value))
