"""The rules as documents: what `--list-rules` and `--explain` print, made from the rules."""

from __future__ import annotations

import inspect
from types import ModuleType

from fsdp_migrate.errors import UsageError
from fsdp_migrate.rewrite import configs
from fsdp_migrate.rewrite.rule import Rule
from fsdp_migrate.rewrite.rules import RULES


def find(name: str) -> type[Rule] | ModuleType:
    """The rule for code, or the configuration dialect. Raises UsageError for an unknown name."""
    for rule in RULES:
        if rule.name == name:
            return rule
    if name in configs.RULES:
        return configs.RULES[name]
    known = [*(rule.name for rule in RULES), *configs.RULES]
    close = [other for other in known if name in other or other in name]
    hint = f"; did you mean {', '.join(close)}?" if close else "; see --list-rules"
    raise UsageError(f"there is no rule {name}{hint}")


def check(names: tuple[str, ...]) -> None:
    for name in names:
        find(name)


def summaries() -> list[tuple[str, str]]:
    """(name, one line) of every rule, in the order they run."""
    return [
        (rule.name, rule.summary() + (" (needs --unsafe)" if rule.unsafe else "")) for rule in RULES
    ] + [(name, _document(dialect).split("\n", 1)[0]) for name, dialect in configs.RULES.items()]


def _document(dialect: ModuleType) -> str:
    return inspect.cleandoc(dialect.__doc__ or "")


def explanation(rule: type[Rule] | ModuleType) -> str:
    """A rule's reason and its examples, as Markdown."""
    if isinstance(rule, ModuleType):
        return f"# {rule.RULE}\n\n{_document(rule)}\n"
    parts = [f"# {rule.name}", rule.explanation()]
    for example in rule.examples:
        parts.append(f"Before:\n\n```python\n{example.before}```")
        same = example.after == example.before
        after = "It is left as it is." if same else f"```python\n{example.after}```"
        parts.append(f"After:\n\n{after}")
    return "\n\n".join(parts) + "\n"
