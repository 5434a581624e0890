from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from fsdp_migrate.rewrite import api, snippets
from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules.arguments import report, translate
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.wrap import (
    PARAMETERS,
    Argument,
    Make,
    Translation,
    call_arguments,
    keyword_texts,
)

Decide = Callable[[File, cst.Call], str]


class WrapFactory(Rule):
    """
    `enable_wrap(wrapper_cls=FSDP)` with `wrap()`, and `partial(FSDP, ...)`: FSDP as a function.

    Both only ever call what they are given, so they are given `fully_shard`. A module is sharded
    once: `wrap(wrap(x))` becomes one call.
    """

    name = "wrap-factory"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp.wrap import enable_wrap, wrap

                with enable_wrap(wrapper_cls=FSDP, mixed_precision=None, use_orig_params=True):
                    model.head = wrap(wrap(model.head))
            """,
            after="""
                from torch.distributed.fsdp import fully_shard
                from torch.distributed.fsdp.wrap import enable_wrap, wrap

                with enable_wrap(wrapper_cls=fully_shard):
                    model.head = wrap(model.head)
            """,
        ),
        Example(
            before="""
                from functools import partial
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                shard = partial(FSDP, use_orig_params=True)
            """,
            after="""
                from functools import partial
                from torch.distributed.fsdp import fully_shard

                shard = partial(fully_shard)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.all_uses):
            if use.api.name == "enable_wrap" and use.call and _is_fsdp1(file, use.call):
                if file.open(use.node):
                    self._attempt(file, use, use.call, self._enable)
            elif use.api == api.Api(api.FSDP) and use.call is None:
                above = file.tree.parent(use.node)
                call = file.tree.parent(above) if isinstance(above, cst.Arg) else None
                if not isinstance(call, cst.Call) or call.args[0] is not above:
                    continue
                if file.is_call(call, "functools.partial") and file.open(use.node):
                    self._attempt(file, use, call, self._partial)
        left = any(str(file.api(call.func)) == "enable_wrap" for call in file.left)
        for use in list(file.all_uses):
            if use.api.name == "wrap" and use.call and _is_fsdp1(file, use.call):
                if left:
                    file.skipped(use.node, "waits for enable_wrap, which is left", use.api)
                elif file.open(use.node):
                    self._attempt(file, use, use.call, self._wrap)

    @staticmethod
    def _attempt(file: File, use: Use, call: cst.Call, decide: Decide) -> None:
        before = file.copy_state()
        try:
            message = decide(file, call)
        except Undecided as reason:
            file.restore(before)
            file.todo(use.node, use.api, str(reason))
            file.cover_below(call)
            file.left.append(call)
            file.keep_values(call)
            return
        file.factories += 1
        file.rewritten(use.node, use.api, message)

    @staticmethod
    def _enable(file: File, call: cst.Call) -> str:
        arguments = [_named(arg) for arg in call.args]
        wrapper = next((one for one in arguments if one.name == "wrapper_cls"), None)
        if wrapper is None or str(file.api(wrapper.value)) != api.FSDP:
            raise Undecided("which wrapper_cls is meant cannot be seen here")
        rest = [one for one in arguments if one is not wrapper]
        translation = translate(file, rest, call)
        _no_steps(translation)
        file.covered(wrapper.value)

        def text() -> str:
            target, keywords = _target(file, translation, call)
            if translation.only_synced:
                partial = file.name("functools.partial", call)
                target, keywords = f"{partial}({target}, {keywords[0]})", keywords[1:]
            return file.call(file.render(call.func), [f"wrapper_cls={target}", *keywords], call)

        _apply(file, call, translation, text)
        return "wraps with fully_shard"

    @staticmethod
    def _wrap(file: File, call: cst.Call) -> str:
        if not call.args or call.args[0].star:
            raise Undecided("which module is wrapped cannot be seen here")
        inner = call.args[0].value
        translation = translate(file, [_named(arg) for arg in call.args[1:]], call)
        _no_steps(translation)
        if translation.units is not None:
            raise Undecided("auto_wrap_policy in wrap(): shard the units with fully_shard")
        if isinstance(inner, cst.Call) and str(file.api(inner.func)) == "wrap":
            if len(call.args) > 1 or len(inner.args) > 1:
                raise Undecided("wrap(wrap(x)) with arguments: a module is sharded once")
            file.edits.replace(call, lambda: file.render(inner))
            return "one call: a module is sharded once"

        def text() -> str:
            passed = [file.render(inner), *keyword_texts(translation.all_keywords())]
            return file.call(file.render(call.func), passed, call)

        if len(call.args) > 1:
            _apply(file, call, translation, text)
        return "calls what enable_wrap was given"

    @staticmethod
    def _partial(file: File, call: cst.Call) -> str:
        rest = cst.Call(call.func, call.args[1:])
        translation = translate(file, list(call_arguments(rest, first=1)), call)
        _no_steps(translation)

        def text() -> str:
            target, keywords = _target(file, translation, call)
            return file.call(file.render(call.func), [target, *keywords], call)

        _apply(file, call, translation, text)
        return "a partial of fully_shard"


def _is_fsdp1(file: File, call: cst.Call) -> bool:
    """Whether anything in the call is FSDP1's: the wrapper, an argument name, a second wrap."""
    for arg in call.args:
        name = arg.keyword.value if arg.keyword else None
        if name in PARAMETERS or arg.star == "**":
            return True
        if name == "wrapper_cls" and any(
            str(file.api(node)) == api.FSDP
            for leaf in file.values.leaves(arg.value)
            for node in walk(leaf)
        ):
            return True
        inner = arg.value
        if isinstance(inner, cst.Call) and str(file.api(inner.func)) == "wrap":
            return True
    return False


def _named(arg: cst.Arg) -> Argument:
    if arg.star == "**":
        return Argument("**", arg.value, arg)
    if arg.star or arg.keyword is None:
        raise Undecided("positional arguments cannot be matched here")
    return Argument(arg.keyword.value, arg.value, arg)


def _no_steps(translation: Translation) -> None:
    steps = translation.before or translation.after or translation.init
    if steps and not translation.only_synced:
        raise Undecided("initialisation and prefetch arguments need statements around each call")


def _target(file: File, translation: Translation, at: cst.Call) -> tuple[str, Sequence[str]]:
    """What is called in FSDP's place, and its further arguments."""
    target, keywords = _sharder(file, translation, at)
    if translation.only_synced:
        return snippets.shard_from_rank0(file), [target, *keywords]
    return target, keywords


def _sharder(file: File, translation: Translation, at: cst.Call) -> tuple[str, Sequence[str]]:
    keywords = keyword_texts(translation.all_keywords())
    units = translation.units
    if translation.helper == "shard_by_policy":
        return snippets.shard_by_policy(file), [*keywords, "root=True"]
    if translation.helper == "shard_units":
        return snippets.shard_units(file), keywords
    if units is None:
        return file.fsdp2("fully_shard", at), keywords
    if units.predicate is None or units.condition is not None:
        policy = f"policy={units.policy()}"
        if units.condition is not None:
            policy = f"{policy} if {units.condition()} else None"
        return snippets.shard_by_policy(file), [policy, *keywords, "root=True"]
    is_unit = f"is_unit=lambda module: {units.predicate('module')}"
    return snippets.shard_units(file), [is_unit, *keywords]


def _apply(file: File, call: cst.Call, translation: Translation, text: Make) -> None:
    for make in translation.setup:
        file.edits.before(file.tree.statement(call), make)
    units = translation.units
    if units is not None and units.predicate is not None and units.condition is None:
        for node in units.read:
            file.values.consume(node)
    file.edits.replace(call, text)
    report(file, translation)
