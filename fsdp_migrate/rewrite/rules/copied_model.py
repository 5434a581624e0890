from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File, Wrapped
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.wrap_call import Writer
from fsdp_migrate.rewrite.tree import walk

_CHANGES = frozenset({"load_state_dict", "step", "backward", "load_checkpoint"})


class CopiedModel(Rule):
    """
    A deep copy of a wrapped model is taken before sharding, and sharded alike.

    FSDP2 refuses to copy a sharded module. Where the copy follows the wrapping in the same
    block, and nothing has trained or loaded in between, both orders give the same copy.
    """

    name = "copied-model"
    examples = (
        Example(
            before="""
                import copy
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import ModuleWrapPolicy

                model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
                ema = copy.deepcopy(model)
            """,
            after="""
                import copy
                from torch.distributed.fsdp import fully_shard

                ema = copy.deepcopy(model)
                for module in reversed(list(model.modules())):
                    if module is not model and isinstance(module, Block):
                        fully_shard(module)
                fully_shard(model)
                for module in reversed(list(ema.modules())):
                    if module is not ema and isinstance(module, Block):
                        fully_shard(module)
                fully_shard(ema)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for call in file.tree.all(cst.Call):
            if not file.is_call(call, "copy.deepcopy") or len(call.args) != 1:
                continue
            model = call.args[0].value
            if not file.models.is_model(model) or not file.open(call):
                continue
            wrapped = self._wrapped_above(file, call, model)
            if wrapped is None:
                message = "copy before sharding and shard the copy alike: FSDP2 refuses this"
                file.todo(call, "copy.deepcopy", message)
                continue
            self._copy_before(file, call, wrapped)
            file.rewritten(call, "copy.deepcopy", "copied before sharding, and sharded alike")

    @staticmethod
    def _wrapped_above(file: File, call: cst.Call, model: cst.BaseExpression) -> Wrapped | None:
        """The wrapping just before, if the copy can be taken ahead of it."""
        statement = file.tree.statement(call)
        plain = isinstance(statement, cst.Assign) and statement.value is call
        if not plain or not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
            return None
        if dotted(statement.targets[0].target) is None:
            return None
        block = file.tree.block(statement)
        for wrapped in file.wraps:
            if wrapped.statement not in block or not file.is_whole(wrapped.call):
                continue
            between = block[block.index(wrapped.statement) + 1 : block.index(statement)]
            steps = wrapped.translation.before or wrapped.translation.init
            named = file.tree.code(model) in wrapped.names
            after = block.index(wrapped.statement) < block.index(statement)
            if named and after and not steps and not any(map(_changes, between)):
                return wrapped
        return None

    @staticmethod
    def _copy_before(file: File, call: cst.Call, wrapped: Wrapped) -> None:
        statement = file.tree.statement(call)
        assert isinstance(statement, cst.Assign)
        target = statement.targets[0].target
        copying = call.func

        def copy(model: str) -> str:
            return f"{file.render(target)} = {file.render(copying)}({model})"

        writer = wrapped.writer
        assert isinstance(writer, Writer)
        wrapped.translation.before.append(copy)
        file.edits.replace_statement(statement, lambda: writer.shard_copy(file.render(target)))


def _changes(statement: cst.CSTNode) -> bool:
    """Whether a statement may change the model's weights."""
    return any(
        isinstance(node, cst.Attribute) and node.attr.value in _CHANGES for node in walk(statement)
    )
