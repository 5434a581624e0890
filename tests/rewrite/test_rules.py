"""Every rule keeps what its own examples promise; the examples are also its documentation."""

from __future__ import annotations

import re

import pytest

from fsdp_migrate.rewrite import Options, rewrite_source
from fsdp_migrate.rewrite.explain import explanation, find, summaries
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.rules import RULES

CASES = [
    pytest.param(example, Options(unsafe=rule.unsafe), id=f"{rule.name}-{number}")
    for rule in RULES
    for number, example in enumerate(rule.examples)
]


@pytest.mark.parametrize(("example", "options"), CASES)
def test_example_holds(example: Example, options: Options) -> None:
    """Each rule does to its own examples exactly what it tells the user it does."""
    assert rewrite_source(example.before, options).after == example.after


@pytest.mark.parametrize(("example", "options"), CASES)
def test_a_second_run_changes_nothing(example: Example, options: Options) -> None:
    """Code that was rewritten, or left with a marker, is not touched again."""
    assert rewrite_source(example.after, options).after == example.after


@pytest.mark.parametrize(("example", "options"), CASES)
def test_output_compiles(example: Example, options: Options) -> None:
    """What is written is Python."""
    compile(rewrite_source(example.before, options).after, "<after>", "exec")


@pytest.mark.parametrize(("example", "options"), CASES)
def test_without_the_import_nothing_happens(example: Example, options: Options) -> None:
    """The same words under another home are somebody else's: names decide nothing."""
    foreign = re.sub(r"torch\.distributed\.(fsdp|checkpoint)", "elsewhere.sharded", example.before)

    result = rewrite_source(foreign, options)

    assert result.after == foreign
    assert {site.state for site in result.sites} <= {"skipped"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_is_documented(rule: type[Rule]) -> None:
    """A rule has a name for the command line, a reason, and an example."""
    assert re.fullmatch(r"[a-z0-9-]+", rule.name)
    assert rule.summary().endswith((".", ":"))
    assert rule.examples
    assert rule.summary() in explanation(find(rule.name))


def test_names_are_unique() -> None:
    """Rules are selected by name."""
    names = [name for name, _ in summaries()]

    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("example", "options"), CASES)
def test_every_name_that_is_left_is_accounted_for(example: Example, options: Options) -> None:
    """FSDP1 names in the output stand there because the report says so."""
    result = rewrite_source(example.before, options)

    left = re.findall(r"\b(FSDP|ShardingStrategy|MixedPrecision|CPUOffload)\b", result.after)
    if left:
        assert {site.state for site in result.sites} & {"todo", "skipped"}
