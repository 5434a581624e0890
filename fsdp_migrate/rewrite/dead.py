"""
Statements whose value nothing reads any more, because rewritten code no longer asks for it.

Only statements that hold something of FSDP1 (a policy, a config object) are taken out, and only
when every read of their variable was replaced; anything else of the user's stays.
"""

from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import Binding
from fsdp_migrate.rewrite.tree import walk


def drop_dead(file: File) -> None:
    settled: set[int] = set()
    pending = list(file.values.consumed.values())
    while pending:
        node = pending.pop()
        if not isinstance(node, cst.Name):
            continue
        for binding in file.names.lookup(node.value, node):
            if id(binding) in settled or not _removable(file, binding, node):
                continue
            settled.add(id(binding))
            statement = file.tree.statement(binding.node)
            file.edits.remove(statement)
            file.cover_below(statement)
            for inner in walk(statement):
                file.values.consume(inner)
                pending.append(inner)


def _removable(file: File, binding: Binding, read: cst.Name) -> bool:
    statement = binding.node
    if isinstance(statement, cst.Assign):
        plain = len(statement.targets) == 1 and isinstance(statement.targets[0].target, cst.Name)
    else:
        top = isinstance(file.tree.parent(statement), cst.Module)
        plain = isinstance(statement, cst.FunctionDef) and top
    if not plain or file.edits.is_rebuilt(statement) or not _is_fsdp1(file, statement):
        return False
    if read.value in file.project.exported(file.path):
        return False
    uses = file.values.uses(read.value, read)
    return all(id(use) in file.values.consumed for use in uses)


def _is_fsdp1(file: File, statement: cst.CSTNode) -> bool:
    return any(file.tree.inside(use.node, statement) for use in file.all_uses)
