"""How rewritten calls are laid out: on one line if it fits, else one argument a line."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

_WIDTH = 88


def call_text(function: str, arguments: Sequence[str], indentation: int) -> str:
    line = f"{function}({', '.join(arguments)})"
    if indentation + len(line) <= _WIDTH and "\n" not in line:
        return line
    together = ", ".join(arguments)
    if indentation + 4 + len(together) <= _WIDTH and "\n" not in together:
        return f"{function}(\n    {together}\n)"
    return exploded(function, arguments)


def exploded(function: str, arguments: Sequence[str]) -> str:
    inner = [line for text in arguments for line in shifted(f"{text},", 1)]
    return "\n".join([f"{function}(", *inner, ")"])


def one_a_line(call: cst.Call) -> bool:
    return len(call.args) > 1 and all(
        isinstance(arg.comma, cst.Comma)
        and isinstance(arg.comma.whitespace_after, cst.ParenthesizedWhitespace)
        for arg in call.args[:-1]
    )


def shifted(text: str, levels: int) -> list[str]:
    """The lines of `text`, indented; strings that span lines stay as they are."""
    lines = text.split("\n")
    if '"""' in text or "'''" in text:
        return ["    " * levels + lines[0], *lines[1:]]
    return ["    " * levels + line if line else line for line in lines]
