from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import snippets
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.tree import walk

_NULL = frozenset({"contextlib.nullcontext"})


class NoSync(Rule):
    """
    `no_sync()` becomes `set_requires_gradient_sync`.

    Where one `with` block decides for every backward pass whether to synchronise, that decision
    is set directly. In all other places (plain blocks, values passed around, several backward
    passes) a small context manager keeps the expression and restores the flag.
    """

    name = "no-sync"
    examples = (
        Example(
            before="""
                from contextlib import nullcontext
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                for step, batch in enumerate(loader):
                    last = step % 4 == 3
                    with nullcontext() if last else model.no_sync():
                        model(batch).backward()
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                for step, batch in enumerate(loader):
                    last = step % 4 == 3
                    model.set_requires_gradient_sync(bool(last))
                    model(batch).backward()
            """,
        ),
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                with model.no_sync():
                    model(batch).backward()
            """,
            after="""
                import contextlib
                from torch.distributed.fsdp import fully_shard


                @contextlib.contextmanager
                def no_sync(model):
                    \"\"\"Accumulate gradients on each rank, as FSDP1's no_sync did.\"\"\"
                    model.set_requires_gradient_sync(False)
                    try:
                        yield
                    finally:
                        model.set_requires_gradient_sync(True)


                fully_shard(model)
                with no_sync(model):
                    model(batch).backward()
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for node in file.tree.all(cst.Attribute):
            if node.attr.value != "no_sync" or file.qualified(node):
                continue
            sure = file.models.is_model(node.value)
            receiver = dotted(node.value) or ""
            if not sure and not (file.has_fsdp and "model" in receiver.lower()):
                continue
            if file.open(node):
                choice = file.tree.nearest(node, cst.IfExp)
                other = choice is not None and _speaks_of_ddp(file, choice)
                sure = sure and not other and not file.models.may_be_ddp(node.value)
                self._one(file, node, sure)

    def _one(self, file: File, node: cst.Attribute, sure: bool) -> None:
        what = f"{file.tree.code(node.value)}.no_sync"
        above = file.tree.parent(node)
        call = above if isinstance(above, cst.Call) and above.func is node else None
        block = self._only_decision(file, call) if call is not None and sure else None
        if block is not None and call is not None:
            self._set(file, node, call, block)
            file.rewritten(node, what, "set_requires_gradient_sync for each backward pass")
            return
        if call is not None:
            file.edits.replace(call, lambda: self._helper(file, node, sure))
        else:
            file.edits.replace(node, lambda: self._uncalled(file, node, sure))
        file.rewritten(node, what, "a context manager over set_requires_gradient_sync")

    @staticmethod
    def _only_decision(file: File, call: cst.Call) -> cst.With | None:
        """The `with no_sync() if c else nullcontext():` that holds the only backward pass."""
        choice = file.tree.parent(call)
        item = file.tree.parent(choice) if isinstance(choice, cst.IfExp) else None
        block = file.tree.parent(item) if isinstance(item, cst.WithItem) else None
        if not isinstance(block, cst.With) or not isinstance(choice, cst.IfExp):
            return None
        other = choice.orelse if choice.body is call else choice.body
        if choice.test is call or not file.is_call(other, *_NULL) or _speaks_of_ddp(file, choice):
            return None
        passes = [one for one in file.tree.all(cst.Attribute) if one.attr.value == "backward"]
        return block if passes and all(file.tree.inside(one, block) for one in passes) else None

    @staticmethod
    def _set(file: File, node: cst.Attribute, call: cst.Call, block: cst.With) -> None:
        choice = file.tree.parent(call)
        item = file.tree.parent(choice)  # type: ignore[arg-type]
        assert isinstance(choice, cst.IfExp) and isinstance(item, cst.WithItem)
        unsynced_when_true = choice.body is call
        test = choice.test

        def text() -> str:
            synced = _negated(file, test) if unsynced_when_true else _truth(file, test)
            return f"{file.render(node.value)}.set_requires_gradient_sync({synced})"

        file.edits.before(block, text)
        for name in walk(choice):
            file.values.consume(name)
        file.unwrap(block, item)

    @staticmethod
    def _helper(file: File, node: cst.Attribute, sure: bool) -> str:
        return f"{snippets.no_sync(file, sure=sure)}({file.render(node.value)})"

    @staticmethod
    def _uncalled(file: File, node: cst.Attribute, sure: bool) -> str:
        partial = file.name("functools.partial", node)
        return f"{partial}({snippets.no_sync(file, sure=sure)}, {file.render(node.value)})"


def _speaks_of_ddp(file: File, choice: cst.IfExp) -> bool:
    """Whether the condition itself says that the model may be a DistributedDataParallel."""
    return any(
        isinstance(node, cst.Name) and str(file.qualified(node)).startswith("torch.nn.parallel.")
        for node in walk(choice.test)
    )


def _truth(file: File, test: cst.BaseExpression) -> str:
    text = file.render(test)
    sure = isinstance(test, cst.Comparison) or (
        isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not)
    )
    return text if sure else f"bool({text})"


def _negated(file: File, test: cst.BaseExpression) -> str:
    """The opposite of a condition, without a `not` where that reads better."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return _truth(file, test.expression)
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        one = test.comparisons[0]
        for old, new in ((cst.NotEqual, "=="), (cst.Equal, "!=")):
            if isinstance(one.operator, old):
                return f"{file.render(test.left)} {new} {file.render(one.comparator)}"
    text = file.render(test)
    plain = isinstance(test, cst.Name | cst.Attribute | cst.Call)
    return f"not {text}" if plain else f"not ({text})"
