"""Which library a name in a Python file comes from, for the few calls that configure FSDP."""

from __future__ import annotations

import ast


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> the dotted name it was imported as, wherever in the file the import stands."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def qualified(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name that an expression such as `pl.strategies.FSDPStrategy` stands for, or ""."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = qualified(node.value, names)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
