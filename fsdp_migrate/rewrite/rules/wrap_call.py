from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from fsdp_migrate.rewrite import api, snippets
from fsdp_migrate.rewrite.edits import Piece
from fsdp_migrate.rewrite.file import File, Use, Wrapped, call_text, shifted
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.argument_init import initialise_meta
from fsdp_migrate.rewrite.rules.argument_kwargs import literal_of
from fsdp_migrate.rewrite.rules.arguments import report, translate
from fsdp_migrate.rewrite.units import renamed
from fsdp_migrate.rewrite.wrap import (
    Argument,
    Translation,
    Undecided,
    call_arguments,
    keyword_texts,
)


class WrapCall(Rule):
    """
    `FSDP(model, ...)` becomes `fully_shard` calls: units first, the model itself last.

    `fully_shard` shards a module in place and returns it, so `model = FSDP(model)` needs no
    assignment. The wrap policy turns into a loop, children before parents. Each argument is
    another rule's business; if one of them cannot be decided, the whole call is left.
    """

    name = "wrap-call"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
            """,
        ),
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import ModuleWrapPolicy

                sharded = FSDP(Net().to(rank), auto_wrap_policy=ModuleWrapPolicy({Block}))
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                sharded = Net().to(rank)
                for module in reversed(list(sharded.modules())):
                    if module is not sharded and isinstance(module, Block):
                        fully_shard(module)
                fully_shard(sharded)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        start = file.copy_state()
        while not self._decide_all(file):
            file.restore(start)

    def _decide_all(self, file: File) -> bool:
        """False when a dict turned out to be shared with a call that has to be left."""
        file.left.clear()
        for use in list(file.uses(api.FSDP)):
            if use.call is not None:
                self._decide(file, use, use.call)
        shared = {
            id(made)
            for call in file.left
            for arg in call.args
            if arg.star == "**" and (made := literal_of(file, arg.value)) is not None
        }
        fresh = (shared & set(file.keyword_dicts)) - file.spoilt
        file.spoilt |= fresh
        if fresh:
            return False
        used = {id(leaf) for one in file.wraps for leaf in file.leaves_of(one.call)}
        for call in file.left:
            file.keep_values(call, used)
        return True

    @staticmethod
    def _decide(file: File, use: Use, call: cst.Call) -> None:
        before = file.copy_state()
        try:
            arguments = list(call_arguments(call))
            module = next((one for one in arguments if one.name == "module"), None)
            if module is None:
                raise Undecided("which module is wrapped cannot be seen here")
            rest = [one for one in arguments if one.name != "module"]
            translation = translate(file, rest, call)
            initialise_meta(translation)
            Writer(file, call, module, translation).edit()
        except Undecided as reason:
            file.restore(before)
            file.todo(use.node, use.api, str(reason))
            file.cover_below(call)
            file.left.append(call)
            return
        file.rewritten(use.node, use.api, "fully_shard, in place")
        report(file, translation)


class Writer:
    """Writes the statements that take the place of one FSDP call."""

    def __init__(
        self, file: File, call: cst.Call, module: Argument, translation: Translation
    ) -> None:
        self.file = file
        self.call = call
        self.module = module.value
        self.translation = translation
        self.statement = file.tree.statement(call)
        names = {self._target(), file.tree.code(module.value) if dotted(module.value) else None}
        known = tuple(sorted(name for name in names if name))
        self.placeable = file.runs_once(call)
        wrapped = Wrapped(self.statement, call, known, translation, self.placeable, self)
        file.wraps.append(wrapped)

    def edit(self) -> None:
        edits = self.file.edits
        if not self.placeable:
            self._only_expression()
            edits.replace(self.call, self._expression)
            for make in self.translation.setup:
                edits.before(self.statement, make)
        elif self.file.is_whole(self.call):
            edits.replace_statement(self.statement, self._whole_statement)
        else:
            edits.before(self.statement, self._lines_before)
            edits.replace(self.call, self._in_place)
        self._consume()

    def _only_expression(self) -> None:
        """Raise Undecided if the call needs statements around it that have no place."""
        translation = self.translation
        steps = bool(translation.before or translation.after or translation.init)
        steps = steps and not translation.only_synced
        lazy = self.file.tree.nearest(self.call, cst.Lambda) is not None
        if steps or (lazy and self.translation.setup):
            raise Undecided("the arguments need statements around the call: make it one itself")

    def _lines_before(self) -> str:
        """Everything but the call's value, for a call inside a larger statement."""
        model = self._fresh()
        lines = self._lines(model)
        if self.translation.after:
            lines += [self._root(model), *(step(model) for step in self.translation.after)]
        return "\n".join(lines) if lines else ""

    def _in_place(self) -> str:
        model = self._fresh()
        return model if self.translation.after else self._root(model)

    def _consume(self) -> None:
        units = self.translation.units
        if units is not None and units.predicate is not None:
            for node in units.read:
                self.file.values.consume(node)

    # --- whole statements ----------------------------------------------------------------

    def _whole_statement(self) -> Sequence[Piece]:
        target = self._target()
        model = self._fresh() if target is None or dotted(self.module) else target
        lines = self._lines(model)
        if isinstance(self.statement, cst.Return):
            lines.append(self._root(model))
            if self.translation.after:
                lines += [step(model) for step in self.translation.after]
                return [*lines, f"return {model}"]
            lines[-1] = f"return {lines[-1]}"
            return lines
        root = self._root(model)
        same = target == model or isinstance(self.statement, cst.Expr)
        lines.append(root if same else f"{self._targets()} = {root}")
        return [*lines, *(step(model) for step in self.translation.after)]

    def shard_copy(self, name: str) -> list[str]:
        """The same sharding for a copy of the model."""
        original = self._target() or self._fresh()
        lines = [renamed(line, original, name) for line in self._unit_lines(name)]
        after = [step(name) for step in self.translation.after]
        return [*lines, self._root(name), *after]

    def _target(self) -> str | None:
        """The one plain name that the statement assigns to."""
        if isinstance(self.statement, cst.Assign) and len(self.statement.targets) == 1:
            target: cst.CSTNode = self.statement.targets[0].target
        elif isinstance(self.statement, cst.AnnAssign):
            target = self.statement.target
        else:
            return None
        return self.file.tree.code(target) if dotted(target) else None

    def _targets(self) -> str:
        if isinstance(self.statement, cst.Assign):
            targets = [self.file.render(target.target) for target in self.statement.targets]
            return " = ".join(targets)
        assert isinstance(self.statement, cst.AnnAssign)
        return self.file.render(self.statement.target)

    # --- parts ---------------------------------------------------------------------------

    def _fresh(self) -> str:
        """The name the model goes by: its own, or a new one for an expression."""
        if dotted(self.module):
            return self.file.render(self.module)
        return self.file.needs.local("model", self.call)

    def _lines(self, model: str) -> list[str]:
        """Everything that comes before the root's own fully_shard."""
        lines = [] if dotted(self.module) else [f"{model} = {self.file.render(self.module)}"]
        if dotted(self.module) and model != self.file.render(self.module):
            lines.append(f"{model} = {self.file.render(self.module)}")
        lines += [make() for make in self.translation.setup]
        lines += [step(model) for step in self.translation.before]
        if self.translation.init is not None and not self._by_policy():
            return lines
        if self._shared():
            name = self.file.needs.local("fsdp_kwargs", self.call)
            lines.append(self._format(f"{name} = dict", self._keywords()))
        return [*lines, *self._unit_lines(model)]

    def _unit_lines(self, model: str) -> list[str]:
        units = self.translation.units
        if units is None:
            return []
        shard = self.file.fsdp2("fully_shard", self.call)
        keywords = [*self._passed(), *keyword_texts(self.translation.unit_keywords)]
        if units.predicate is None:
            helper = snippets.shard_by_policy(self.file, init=self.translation.init is not None)
            passed = [model, units.policy(), *keywords]
            if self.translation.init is not None:
                passed.insert(2, f"init_fn={self.translation.init()}")
            lines = [self._format(helper, passed)]
        else:
            variable = self.file.needs.local("module", self.call, avoid=model)
            test = units.predicate(variable)
            test = f"({test})" if " or " in test or " if " in test else test
            lines = [
                f"for {variable} in reversed(list({model}.modules())):",
                f"    if {variable} is not {model} and {test}:",
                *shifted(self._format(shard, [variable, *keywords], 2), 2),
            ]
        if units.condition is not None:
            inner = [text for line in lines for text in shifted(line, 1)]
            lines = [f"if {units.condition()}:", *inner]
        return ["\n".join(lines)]

    def _root(self, model: str) -> str:
        if self.translation.init is not None and not self._by_policy():
            return self._from_meta(model)
        if self.translation.helper is not None:
            return self._through_helper(model)
        if self.translation.init is not None:
            return self._root_from_meta(model)
        own = keyword_texts(self.translation.root_keywords)
        shard = self.file.fsdp2("fully_shard", self.call)
        return self._format(shard, [model, *self._passed(), *own])

    def _root_from_meta(self, model: str) -> str:
        """The units are sharded already, each after its init; what is left is the root's own."""
        init = self.translation.init
        assert init is not None
        helper = snippets.shard_from_meta(self.file)
        own = keyword_texts(self.translation.root_keywords)
        return self._format(helper, [model, "None", init(), *self._passed(), *own])

    def _through_helper(self, model: str) -> str:
        if self.translation.helper == "shard_units":
            helper = snippets.shard_units(self.file)
            return self._format(helper, [model, *self._keywords()])
        helper = snippets.shard_by_policy(self.file)
        return self._format(helper, [model, *self._keywords(), "root=True"])

    def _by_policy(self) -> bool:
        """Whether a helper walks the model by a policy that is not a plain condition."""
        units = self.translation.units
        return units is not None and units.predicate is None

    def _from_meta(self, model: str) -> str:
        init = self.translation.init
        units = self.translation.units
        assert init is not None
        test = "None"
        if units is not None and units.predicate is not None:
            test = f"lambda module: {units.predicate('module')}"
            if units.condition is not None:
                test = f"({test}) if {units.condition()} else None"
        helper = snippets.shard_from_meta(self.file)
        return self._format(helper, [model, test, init(), *self._keywords()])

    def _keywords(self) -> list[str]:
        return keyword_texts(self.translation.all_keywords())

    def _passed(self) -> list[str]:
        """The keyword arguments as each fully_shard call spells them."""
        if self._shared():
            return [f"**{self.file.needs.local('fsdp_kwargs', self.call)}"]
        return self._keywords()

    def _shared(self) -> bool:
        """Whether the arguments are worth a dict of their own."""
        named = [name for name, _ in self.translation.all_keywords() if name]
        return (
            self.translation.units is not None
            and self.translation.init is None
            and (len(named) > 1 or sum(map(len, self._keywords())) > 60)
        )

    def _expression(self) -> str:
        """The call where no statement can be put: a helper does the loop."""
        model = self.file.render(self.module)
        units = self.translation.units
        keywords = self._keywords()
        if units is None:
            return self._synced(self._root(model))
        if units.condition is not None or units.predicate is None:
            helper = snippets.shard_by_policy(self.file)
            policy = units.policy()
            if units.condition is not None:
                policy = f"{policy} if {units.condition()} else None"
            made = self._format(helper, [model, policy, *keywords, "root=True"])
            return self._synced(made)
        helper = snippets.shard_units(self.file)
        test = f"lambda module: {units.predicate('module')}"
        return self._synced(self._format(helper, [model, test, *keywords]))

    def _synced(self, call: str) -> str:
        """`shard(model, ...)` by way of the helper that copies rank 0's weights, if asked for."""
        if not self.translation.only_synced:
            return call
        function, rest = call.split("(", 1)
        return f"{snippets.shard_from_rank0(self.file)}({function}, {rest}"

    def _format(self, function: str, arguments: list[str], deeper: int = 0) -> str:
        indentation = self.file.indentation(self.call) + 4 * deeper
        return call_text(function, arguments, indentation)
