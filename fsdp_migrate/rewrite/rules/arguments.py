"""Every argument of FSDP(...), given to the rule whose business it is."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Rule
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.wrap import (
    Argument,
    Outcome,
    Translation,
)


class ArgumentRule(Rule):
    """A rule that says what one or more arguments of FSDP(...) become."""

    arguments: ClassVar[tuple[str, ...]]

    def decide(self, file: File) -> None:
        """Arguments are decided with the call they belong to."""

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        """
        Add what `argument` becomes to `into`; the state and message of its line in the report.

        Raises Undecided when that cannot be known.
        """
        raise NotImplementedError


def translate(file: File, arguments: list[Argument], at: cst.CSTNode) -> Translation:
    """What these arguments become together. Raises Undecided when one cannot be decided."""
    named = {argument.name: argument for argument in arguments}
    translation = Translation(file, at, arguments=named)
    rules = {name: rule for rule in file.argument_rules for name in rule.arguments}
    for argument in arguments:
        rule = rules.get(argument.name)
        if rule is None:
            raise Undecided(f"the argument {argument.name} is not one of FSDP's")
        if not file.options.wants(rule.name):
            raise Undecided(f"{argument.name}: the rule {rule.name} is switched off")
        state, message = rule().translate(argument, translation)
        translation.outcomes.append(Outcome(argument, rule.name, state, message))
    return translation


def report(file: File, translation: Translation) -> None:
    """Account for every argument, under the rule whose business it was; once for shared dicts."""
    running = file.rule
    for outcome in translation.outcomes:
        argument = outcome.argument
        if file.accounted(argument.node):
            continue
        file.rule = outcome.rule
        record = file.rewritten if outcome.state == "rewritten" else file.differs
        record(argument.node, argument.api, outcome.message)
    file.rule = running
