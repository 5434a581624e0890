from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.state_dict_modes import STATE_DICT_HOME, arguments
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import is_none, truth

_DCP = "torch.distributed.checkpoint"
_SAVE = ("state_dict", "storage_writer", "process_group", "coordinator_rank", "no_dist", "planner")
_LOAD = ("state_dict", "storage_reader", "process_group", "coordinator_rank", "no_dist", "planner")
_OPTIMIZER = ("model_state_dict", "optimizer_key", "storage_reader", "planner")
_FILES = frozenset(
    {f"{_DCP}.{kind}" for kind in ("FileSystemWriter", "FileSystemReader")}
    | {f"{_DCP}.filesystem.{kind}" for kind in ("FileSystemWriter", "FileSystemReader")}
)
_PLANNERS = frozenset(
    {f"{_DCP}.default_planner.{kind}" for kind in ("DefaultSavePlanner", "DefaultLoadPlanner")}
    | {f"{_DCP}.{kind}" for kind in ("DefaultSavePlanner", "DefaultLoadPlanner")}
)


class OldCheckpoint(Rule):
    """
    The first distributed checkpoint API becomes today's: `save`, `load`, one load for all.

    A plain file system reader or writer is said as `checkpoint_id=`; default planners go.
    `load_sharded_optimizer_state_dict` read into sharded tensors of its own; now the optimizer's
    own state is read into.
    """

    name = "old-checkpoint"
    examples = (
        Example(
            before="""
                import torch.distributed.checkpoint as dist_cp
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                dist_cp.save_state_dict(
                    state_dict=state, storage_writer=dist_cp.FileSystemWriter(path)
                )
            """,
            after="""
                import torch.distributed.checkpoint as dist_cp

                dist_cp.save(state, checkpoint_id=path)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        if not file.is_fsdp1:
            return
        for use in list(file.all_uses):
            if not use.api.name.startswith("dcp.") or not file.open(use.node):
                continue
            try:
                if use.call is None:
                    raise Undecided("the function is passed on as a value")
                message = self._one(file, use, use.call)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))
                continue
            file.rewritten(use.node, use.api, message)

    def _one(self, file: File, use: Use, call: cst.Call) -> str:
        if use.api.name == "dcp.load_sharded_optimizer_state_dict":
            return self._optimizer(file, call)
        saves = use.api.name == "dcp.save_state_dict"
        given = arguments(call, _SAVE if saves else _LOAD)
        if not is_none(given.get("coordinator_rank")) and _number(given.get("coordinator_rank")):
            raise Undecided("coordinator_rank: today's API always takes rank 0")
        if "no_dist" in given and truth(given["no_dist"]) is not False:
            raise Undecided("no_dist: today's API sees for itself whether there are ranks")

        def text() -> str:
            name = file.name(f"{_DCP}.{'save' if saves else 'load'}", use.node)
            passed = [file.render(given["state_dict"]), *_storage(file, given)]
            return file.call(name, passed, call)

        file.edits.replace(call, text)
        return "today's name and arguments"

    def _optimizer(self, file: File, call: cst.Call) -> str:
        """`x = load_sharded_optimizer_state_dict(...)` reads into the optimizer's own state."""
        given = arguments(call, _OPTIMIZER)
        statement = file.tree.statement(call)
        if not isinstance(statement, cst.Assign) or statement.value is not call:
            raise Undecided("assign the loaded state to a variable first")
        target = dotted(statement.targets[0].target)
        taken = _taken(file, target, statement)
        if taken is None or "optimizer_key" not in given:
            raise Undecided("which optimizer the state is for cannot be seen in this function")
        model, optimizer = taken

        def lines() -> list[str]:
            get = file.name(f"{STATE_DICT_HOME}.get_optimizer_state_dict", call)
            state = f"{get}({file.render(model)}, {file.render(optimizer)})"
            load = file.name(f"{_DCP}.load", call.func)
            passed = [str(target), *_storage(file, given)]
            return [
                f"{target} = {{{file.render(given['optimizer_key'])}: {state}}}",
                file.call(load, passed, call),
            ]

        file.edits.replace_statement(statement, lines)
        return "read into the optimizer's own sharded state"


def _storage(file: File, given: dict[str, cst.BaseExpression]) -> list[str]:
    passed = []
    for name in ("storage_writer", "storage_reader"):
        value = given.get(name)
        if value is None:
            continue
        if file.is_call(value, *_FILES) and isinstance(value, cst.Call) and len(value.args) == 1:
            passed.append(f"checkpoint_id={file.render(value.args[0].value)}")
        else:
            passed.append(f"{name}={file.render(value)}")
    for name in ("planner", "process_group"):
        value = given.get(name)
        plain = file.is_call(value, *_PLANNERS) and isinstance(value, cst.Call) and not value.args
        if value is not None and not is_none(value) and not plain:
            passed.append(f"{name}={file.render(value)}")
    return passed


def _number(value: cst.BaseExpression | None) -> bool:
    return value is not None and not (isinstance(value, cst.Integer) and value.value == "0")


def _taken(
    file: File, target: str | None, statement: cst.CSTNode
) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Model and optimizer of the FSDP call that takes the loaded state."""
    function = file.tree.function(statement)
    scope: cst.CSTNode = function if function is not None else file.tree.module
    for use in file.all_uses:
        if use.api.name != api.FSDP or "to_load" not in str(use.api.member) or use.call is None:
            continue
        if not file.tree.inside(use.call, scope):
            continue
        reads = {node.value for node in walk(use.call) if isinstance(node, cst.Name)}
        plain = {arg.keyword.value: arg.value for arg in use.call.args if arg.keyword}
        values = [arg.value for arg in use.call.args if not arg.keyword]
        if target not in reads:
            continue
        if "model" in plain and "optim" in plain:
            return plain["model"], plain["optim"]
        if len(values) >= 2:
            others = [value for value in values if target not in file.tree.code(value)]
            if len(others) == 2:
                return others[0], others[1]
    return None
