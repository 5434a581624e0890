"""The rules as documents: what `--list-rules` and `--explain` print, made from the rules."""

from __future__ import annotations

from fsdp_migrate.errors import UsageError
from fsdp_migrate.rewrite.rule import Rule
from fsdp_migrate.rewrite.rules import RULES


def find(name: str) -> type[Rule]:
    """Raises UsageError for an unknown rule."""
    for rule in RULES:
        if rule.name == name:
            return rule
    close = [rule.name for rule in RULES if name in rule.name or rule.name in name]
    hint = f"; did you mean {', '.join(close)}?" if close else "; see --list-rules"
    raise UsageError(f"there is no rule {name}{hint}")


def check(names: tuple[str, ...]) -> None:
    for name in names:
        find(name)


def summaries() -> list[tuple[str, str]]:
    """(name, one line) of every rule, in the order they run."""
    return [
        (rule.name, rule.summary() + (" (needs --unsafe)" if rule.unsafe else "")) for rule in RULES
    ]


def explanation(rule: type[Rule]) -> str:
    """A rule's reason and its examples, as Markdown."""
    parts = [f"# {rule.name}", rule.explanation()]
    for example in rule.examples:
        parts.append(f"Before:\n\n```python\n{example.before}```")
        same = example.after == example.before
        after = "It is left as it is." if same else f"```python\n{example.after}```"
        parts.append(f"After:\n\n{after}")
    return "\n\n".join(parts) + "\n"
