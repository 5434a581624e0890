from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import Binding, string_value
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule, translate
from fsdp_migrate.rewrite.wrap import Argument, Translation, Undecided, keyword_texts


class KeywordDict(ArgumentRule):
    """
    A dict of keyword arguments (`FSDP(model, **kwargs)`) is translated where it is written.

    Its entries turn into `fully_shard`'s; the ones that become statements move to each place
    that uses the dict. All uses of the dict must be in sight.
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
        value, file, at = argument.value, into.file, into.at
        if isinstance(value, cst.Call | cst.Dict):
            inner = translate(file, list(_entries(value)), at)
            _merge(inner, into)
            into.keywords.extend(inner.keywords)
            return "rewritten", "the dict's entries are arguments now"
        inner = self._shared(value, file)
        _merge(inner, into)
        for name, found in inner.arguments.items():
            into.arguments.setdefault(name, found)
        into.keywords.append((None, lambda: file.render(value)))
        return "rewritten", "the dict is translated where it is written"

    def _shared(self, value: cst.BaseExpression, file: File) -> Translation:
        """The translation of a dict variable, made once however often it is used."""
        binding = _only_binding(file, value)
        if id(binding) not in file.keyword_dicts:
            file.keyword_dicts[id(binding)] = _translate_dict(file, value, binding)
        found: Translation = file.keyword_dicts[id(binding)]
        return found


def _only_binding(file: File, value: cst.BaseExpression) -> Binding:
    found = file.values.bindings(value)
    if len(found) != 1 or not isinstance(found[0].value, cst.Call | cst.Dict):
        raise Undecided(f"which arguments **{file.tree.code(value)} holds cannot be seen here")
    return found[0]


def _translate_dict(file: File, value: cst.BaseExpression, binding: Binding) -> Translation:
    made = binding.value
    assert isinstance(made, cst.Call | cst.Dict)
    entries = list(_entries(made))
    stores = _stores(file, value)
    known = {entry.name for entry in entries}
    for name, _ in stores:
        if name == "auto_wrap_policy" or name in known & {"auto_wrap_policy"}:
            raise Undecided("the dict's auto_wrap_policy is set in more than one place")
    translation = translate(file, entries, made)
    plain = isinstance(made, cst.Call)
    file.edits.replace(made, lambda: _dict_text(file, made, translation, plain=plain))
    for name, statement in stores:
        _translate_store(file, name, statement, translation)
    return translation


def _entries(made: cst.Call | cst.Dict) -> Iterator[Argument]:
    if isinstance(made, cst.Call):
        if not isinstance(made.func, cst.Name) or made.func.value != "dict":
            raise Undecided("the keyword arguments come from a call that is not dict()")
        for arg in made.args:
            if arg.keyword is None:
                raise Undecided("the dict is made of another one")
            yield Argument(arg.keyword.value, arg.value, arg)
        return
    for element in made.elements:
        key = string_value(element.key) if isinstance(element, cst.DictElement) else None
        if key is None:
            raise Undecided("the dict has keys that cannot be read here")
        yield Argument(key, element.value, element)


def _stores(file: File, value: cst.BaseExpression) -> list[tuple[str, cst.Assign]]:
    """The `kwargs["name"] = ...` statements; Undecided for any use that is not understood."""
    stores = []
    if not isinstance(value, cst.Name):
        raise Undecided("only a dict in a plain variable can be followed to all its uses")
    for use in file.values.uses(value.value, value):
        above = file.tree.parent(use)
        if isinstance(above, cst.Arg) and above.star == "**":
            call = file.tree.parent(above)
            if isinstance(call, cst.Call) and _takes_fsdp_arguments(file, call):
                continue
        if isinstance(above, cst.Subscript) and (stored := _store(file, above)) is not None:
            stores.append(stored)
            continue
        raise Undecided(f"{value.value} is also used where it cannot be followed")
    return stores


def _takes_fsdp_arguments(file: File, call: cst.Call) -> bool:
    found = file.api(call.func)
    if found is not None:
        return str(found) in ("FullyShardedDataParallel", "enable_wrap", "wrap")
    if file.is_call(call, "functools.partial") and call.args:
        inner = file.api(call.args[0].value)
        return inner is not None and str(inner) == "FullyShardedDataParallel"
    return False


def _store(file: File, subscript: cst.Subscript) -> tuple[str, cst.Assign] | None:
    target = file.tree.parent(subscript)
    statement = file.tree.parent(target) if isinstance(target, cst.AssignTarget) else None
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return None
    index = subscript.slice[0].slice if len(subscript.slice) == 1 else None
    key = string_value(index.value) if isinstance(index, cst.Index) else None
    return (key, statement) if key is not None else None


def _translate_store(
    file: File, name: str, statement: cst.Assign, translation: Translation
) -> None:
    inner = translate(file, [Argument(name, statement.value, statement)], statement)
    if inner.before or inner.after or inner.units or inner.init:
        raise Undecided(f"{name} is put into the dict by a statement of its own")
    subscript = statement.targets[0].target
    assert isinstance(subscript, cst.Subscript)
    translation.outcomes.extend(inner.outcomes)
    if any(key is None for key, _ in inner.keywords):
        raise Undecided(f"{name} is put into the dict by a statement of its own")

    def lines() -> list[str]:
        holder = file.render(subscript.value)
        return [f'{holder}["{key}"] = {make()}' for key, make in inner.keywords]

    file.edits.replace_statement(statement, lines)


def _dict_text(
    file: File, made: cst.Call | cst.Dict, translation: Translation, *, plain: bool
) -> str:
    if plain:
        return file.call("dict", keyword_texts(translation.keywords), made)
    texts = [
        f'"{name}": {make()}' if name else f"**{make()}" for name, make in translation.keywords
    ]
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
    reported = {id(outcome) for outcome in outer.outcomes}
    outer.outcomes.extend(one for one in inner.outcomes if id(one) not in reported)
