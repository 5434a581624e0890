from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted, string_value
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule, translate
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import truth
from fsdp_migrate.rewrite.wrap import (
    Argument,
    Step,
    Translation,
    keyword_texts,
)

_POLICY = "auto_wrap_policy"


class KeywordDict(ArgumentRule):
    """
    A dict of keyword arguments (`FSDP(model, **kwargs)`) is translated where it is written.

    Its entries turn into `fully_shard`'s; the ones that become statements move to each place
    that uses the dict. A dict that another function makes, or that gets entries later, keeps the
    choice of units as an entry, for a helper. All uses of the dict must be in sight.
    """

    name = "keyword-dict"
    arguments = ("**",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import ShardingStrategy

                shared = dict(
                    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, limit_all_gathers=True
                )
                policy = FSDP(policy, **shared)
                reference = FSDP(reference, **shared)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                shared = dict(reshard_after_forward=False)
                fully_shard(policy, **shared)
                fully_shard(reference, **shared)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file = argument.value, into.file
        if isinstance(value, cst.Dict) or (
            isinstance(value, cst.Call) and dotted(value.func) == "dict"
        ):
            inner = translate(file, list(_entries(value)), into.at)
            _merge(inner, into)
            into.setup.extend(inner.setup)
            into.keywords.extend(inner.keywords)
            into.mesh, into.strategy = inner.mesh or into.mesh, inner.strategy or into.strategy
            return "rewritten", "the dict's entries are arguments now"
        inner = self._shared(value, file)
        _merge(inner, into)
        for name, found in inner.arguments.items():
            into.arguments.setdefault(name, found)
        into.keywords.append((None, lambda: file.render(value)))
        return "rewritten", "the dict is translated where it is written"

    @staticmethod
    def _shared(value: cst.BaseExpression, file: File) -> Translation:
        """The translation of a dict in a variable, made once however often it is used."""
        found = KeywordVariable(file, value)
        key = id(found.made)
        if key in file.spoilt:
            raise Undecided("the dict is shared with a call that is left as it is")
        if key not in file.keyword_dicts:
            file.keyword_dicts[key] = found.translate()
        translation: Translation = file.keyword_dicts[key]
        return translation


def literal_of(file: File, value: cst.BaseExpression) -> cst.CSTNode | None:
    """The dict literal behind a `**` argument, if it can be followed."""
    try:
        return KeywordVariable(file, value).made
    except Undecided:
        return None


@dataclass(frozen=True, slots=True)
class Store:
    """`kwargs["name"] = value`."""

    name: str
    statement: cst.Assign


class KeywordVariable:
    """
    A variable that holds keyword arguments: the literal it starts as, and its later entries.

    `elsewhere` is set where the literal stands in another function, whose names mean nothing
    at the call.
    """

    def __init__(self, file: File, value: cst.BaseExpression) -> None:
        self.file = file
        self.value = value
        self.stores: list[Store] = []
        self.elsewhere = False
        self.takers: set[str] = set()  # functions of this file that are handed the dict
        self.made = self._literal(value, depth=8)

    def _literal(self, value: cst.BaseExpression, depth: int) -> cst.Call | cst.Dict:
        """Follow variables and functions of this file to the dict literal they give."""
        text = self.file.tree.code(value)
        unknown = Undecided(f"which arguments **{text} holds cannot be seen here")
        if depth == 0:
            raise unknown
        if isinstance(value, cst.Dict):
            return value
        if isinstance(value, cst.Call):
            if dotted(value.func) == "dict":
                return value
            self.elsewhere = True
            return self._literal(self._returned(value), depth - 1)
        bindings = self.file.values.bindings(value)
        if len(bindings) == 1 and isinstance(bindings[0].definition, cst.Param):
            return self._literal(self._handed(value, bindings[0].definition), depth - 1)
        if len(bindings) != 1 or bindings[0].value is None or bindings[0].index is not None:
            raise unknown
        self.stores += self._uses(value)
        return self._literal(bindings[0].value, depth - 1)

    def _handed(self, value: cst.BaseExpression, param: cst.Param) -> cst.BaseExpression:
        """What the one call of a function in this file passes for a parameter."""
        tree, name = self.file.tree, param.name.value
        function = tree.function(param)
        starred = function is not None and function.params.star_kwarg is param
        passed = self.file.models.passed(function, param) if function and not starred else []
        exported = self.file.project.exported(self.file.path)
        if function is None or len(passed) != 1 or function.name.value in exported:
            raise Undecided(f"which arguments **{name} holds cannot be seen here")
        self.elsewhere = True
        self.takers.add(function.name.value)
        self.stores += self._uses(value)
        return passed[0]

    def _returned(self, call: cst.Call) -> cst.BaseExpression:
        tree = self.file.tree
        bindings = self.file.values.bindings(call.func)
        function = bindings[0].definition if len(bindings) == 1 else None
        if not isinstance(function, cst.FunctionDef):
            raise Undecided(f"what {tree.code(call.func)} returns cannot be seen here")
        found = [
            node.value
            for node in walk(function)
            if isinstance(node, cst.Return) and tree.function(node) is function and node.value
        ]
        if len(found) != 1:
            raise Undecided(f"{function.name.value} returns keyword arguments in several places")
        self._only_called_for_fsdp(function)
        return found[0]

    def _only_called_for_fsdp(self, function: cst.FunctionDef) -> None:
        """Each call of the function must give a variable that only FSDP calls take apart."""
        name = function.name
        for use in self.file.values.uses(name.value, function):
            call = self.file.tree.parent(use)
            statement = self.file.tree.statement(use)
            if isinstance(call, cst.Call) and call.func is use:
                above = self.file.tree.parent(call)
                if isinstance(above, cst.Arg) and above.star == "**":
                    continue
                if isinstance(statement, cst.Assign) and statement.value is call:
                    target = statement.targets[0].target
                    if isinstance(target, cst.Name):
                        self._uses(target)
                        continue
            raise Undecided(f"{name.value}() is also used where it cannot be followed")

    def _uses(self, value: cst.BaseExpression) -> list[Store]:
        """The later entries of a variable; Undecided for any use that is not understood."""
        file, tree = self.file, self.file.tree
        text = tree.code(value)
        stores = []
        for use in file.values.reads(value):
            above = tree.parent(use)
            if self._is_handed_on(above):
                continue
            if (self.elsewhere and isinstance(above, cst.Return)) or (
                isinstance(above, cst.Arg) and above.star == "**" and _takes(file, above)
            ):
                continue
            if isinstance(above, cst.Subscript) and (store := _store(file, above)) is not None:
                stores.append(store)
                continue
            raise Undecided(f"{text} is also used where it cannot be followed")
        return stores

    def _is_handed_on(self, above: cst.CSTNode | None) -> bool:
        """Whether a read passes the dict to a function that was followed here."""
        call = self.file.tree.parent(above) if isinstance(above, cst.Arg) else None
        if not isinstance(above, cst.Arg) or above.star or not isinstance(call, cst.Call):
            return False
        return (dotted(call.func) or "").split(".")[-1] in self.takers

    def translate(self) -> Translation:
        entries = list(_entries(self.made))
        translation = translate(self.file, entries, self.made)
        apart = self.elsewhere or any(store.name == _POLICY for store in self.stores)
        if apart:
            self._keep_units(translation)
        if self.elsewhere and (translation.before or translation.init):
            self._closed(translation)
        file, made = self.file, self.made
        file.edits.replace(made, lambda: _dict_text(file, made, translation))
        statement = file.tree.statement(made)
        for make in translation.setup:
            file.edits.before(statement, make)
        for store in self.stores:
            self._translate_store(store, translation)
        return translation

    def _keep_units(self, translation: Translation) -> None:
        """The choice of units goes with the dict, as the argument of a helper that shards."""
        units = translation.units
        stored = any(store.name == _POLICY for store in self.stores)
        translation.units = None
        if units is None and not stored:
            return
        if units is not None and units.condition is not None:
            raise Undecided("a conditional auto_wrap_policy in a dict that is used elsewhere")
        if units is not None and units.predicate is not None and not stored:
            predicate = units.predicate
            text = f"lambda module: {predicate('module')}"
            translation.keywords.append(("is_unit", lambda: text))
            for node in units.read:
                self.file.values.consume(node)
            translation.helper = "shard_units"
            return
        if units is not None:
            policy = units.policy
            translation.keywords.append(("policy", policy))
        translation.helper = "shard_by_policy"

    def _if_stored(self, key: str | None, step: Step) -> Step:
        """`step`, for where the entry was put into the dict."""

        def guarded(model: str) -> str:
            inner = "\n".join(f"    {line}" for line in step(model).split("\n"))
            return f'if "{key}" in {self.file.render(self.value)}:\n{inner}'

        return guarded

    @staticmethod
    def _closed(translation: Translation) -> None:
        """Steps of a dict made elsewhere may only name what means the same everywhere."""
        synced = translation.value("sync_module_states")
        if translation.init or (synced is not None and truth(synced) is not True):
            raise Undecided("initialisation arguments in a dict that another function makes")

    def _translate_store(self, store: Store, translation: Translation) -> None:
        file, statement = self.file, store.statement
        inner = translate(file, [Argument(store.name, statement.value, statement)], statement)
        keywords = inner.all_keywords()
        if inner.units is not None:
            keywords.append(("policy", inner.units.policy))
        fixed = any(key is None for key, _ in keywords)
        if inner.before or inner.init or fixed or (inner.after and self.elsewhere):
            raise Undecided(f"{store.name} is put into the dict by a statement of its own")
        for step in inner.after:
            translation.after.append(self._if_stored(keywords[0][0], step))
        subscript = statement.targets[0].target
        assert isinstance(subscript, cst.Subscript)
        translation.outcomes.extend(inner.outcomes)

        def lines() -> list[str]:
            holder = file.render(subscript.value)
            setup = [make() for make in inner.setup]
            return [*setup, *(f'{holder}["{key}"] = {make()}' for key, make in keywords)]

        file.edits.replace_statement(statement, lines)


def _entries(made: cst.BaseExpression) -> Iterator[Argument]:
    if isinstance(made, cst.Call):
        for arg in made.args:
            if arg.keyword is None:
                raise Undecided("the dict is made of another one")
            yield Argument(arg.keyword.value, arg.value, arg)
        return
    assert isinstance(made, cst.Dict)
    for element in made.elements:
        key = string_value(element.key) if isinstance(element, cst.DictElement) else None
        if key is None:
            raise Undecided("the dict has keys that cannot be read here")
        yield Argument(key, element.value, element)


def _takes(file: File, arg: cst.Arg) -> bool:
    """Whether a `**` argument goes to something that takes FSDP's arguments."""
    call = file.tree.parent(arg)
    if not isinstance(call, cst.Call):
        return False
    found = file.api(call.func)
    if found is not None:
        return str(found) in (api.FSDP, "enable_wrap", "wrap")
    if file.is_call(call, "functools.partial") and call.args:
        return str(file.api(call.args[0].value)) == api.FSDP
    return False


def _store(file: File, subscript: cst.Subscript) -> Store | None:
    target = file.tree.parent(subscript)
    statement = file.tree.parent(target) if isinstance(target, cst.AssignTarget) else None
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    index = subscript.slice[0].slice if len(subscript.slice) == 1 else None
    key = string_value(index.value) if isinstance(index, cst.Index) else None
    return Store(key, statement) if key is not None else None


def _dict_text(file: File, made: cst.Call | cst.Dict, translation: Translation) -> str:
    keywords = translation.all_keywords()
    if isinstance(made, cst.Call):
        return file.call("dict", keyword_texts(keywords), made)
    texts = [f'"{name}": {make()}' if name else f"**{make()}" for name, make in keywords]
    line = "{" + ", ".join(texts) + "}"
    if len(line) + file.indentation(made) < 70:
        return line
    return "\n".join(["{", *(f"    {text}," for text in texts), "}"])


def _merge(inner: Translation, outer: Translation) -> None:
    outer.before.extend(inner.before)
    outer.after.extend(inner.after)
    outer.unit_keywords.extend(inner.unit_keywords)
    outer.units = outer.units or inner.units
    outer.init = outer.init or inner.init
    outer.synced = outer.synced or inner.synced
    outer.helper = outer.helper or inner.helper
    reported = {id(outcome) for outcome in outer.outcomes}
    outer.outcomes.extend(one for one in inner.outcomes if id(one) not in reported)
