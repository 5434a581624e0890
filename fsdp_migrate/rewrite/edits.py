"""
Edits of a module: asked for by rules on original nodes, applied together in one pass.

Only edited statements are built anew; all others stay the very objects that were parsed, so
their bytes cannot change. An edit is a function that gives the new source text; it is called
when the edit is applied and renders the parts it keeps through `render`, so that edits nest:
a rewritten call may hold rewritten arguments. Comments of an edited statement that its new text
lacks are put above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import libcst as cst

from fsdp_migrate.rewrite.apply import Applier
from fsdp_migrate.rewrite.tree import Node, Tree

Piece = str | cst.BaseStatement | cst.EmptyLine


@dataclass(slots=True)
class StatementEdit:
    before: list[Callable[[], str]] = field(default_factory=list)
    body: Callable[[], Sequence[Piece]] | None = None
    after: list[Callable[[], str]] = field(default_factory=list)
    markers: list[str] = field(default_factory=list)
    moved_here: list[cst.CSTNode] = field(default_factory=list)  # to run before it
    moved_below: list[cst.CSTNode] = field(default_factory=list)  # to run after it
    moved_away: bool = False
    blank_lines: int = 0


class Edits:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.replaced: dict[int, Callable[[], str]] = {}
        self.statements: dict[int, StatementEdit] = {}
        self.dirty: set[int] = set()

    def copy_state(self) -> tuple[Any, ...]:
        """All that was asked for so far, for `restore`."""
        return dict(self.replaced), _copied(self.statements), set(self.dirty)

    def restore(self, state: tuple[Any, ...]) -> None:
        replaced, statements, dirty = state
        self.replaced, self.dirty = dict(replaced), set(dirty)
        self.statements = _copied(statements)

    def __bool__(self) -> bool:
        return bool(self.replaced or self.statements)

    def replace(self, node: cst.CSTNode, make: Callable[[], str]) -> None:
        """Put another expression in the place of `node`."""
        assert id(node) not in self.replaced, "an expression is replaced by one rule only"
        self.replaced[id(node)] = make
        self._mark(node)

    def replace_statement(
        self, statement: cst.CSTNode, make: Callable[[], Sequence[Piece]]
    ) -> None:
        edit = self._edit(statement)
        assert edit.body is None, "a statement is replaced by one rule only"
        edit.body = make

    def before(self, statement: cst.CSTNode, make: Callable[[], str]) -> None:
        self._edit(statement).before.append(make)

    def after(self, statement: cst.CSTNode, make: Callable[[], str]) -> None:
        self._edit(statement).after.append(make)

    def remove(self, statement: cst.CSTNode) -> None:
        self.replace_statement(statement, list)

    def move(
        self,
        statement: cst.CSTNode,
        *,
        before: cst.CSTNode | None = None,
        after: cst.CSTNode | None = None,
    ) -> None:
        """Let `statement` run just before or after another one of the same block."""
        self._edit(statement).moved_away = True
        if before is not None:
            self._edit(before).moved_here.append(statement)
        if after is not None:
            self._edit(after).moved_below.append(statement)

    def mark(self, statement: cst.CSTNode, text: str) -> None:
        """Put a comment above `statement`."""
        self._edit(statement).markers.append(text)

    def space(self, statement: cst.CSTNode, lines: int) -> None:
        """Put blank lines above `statement`."""
        self._edit(statement).blank_lines = lines

    def is_replaced(self, node: cst.CSTNode) -> bool:
        return id(node) in self.replaced

    def is_rebuilt(self, statement: cst.CSTNode) -> bool:
        edit = self.statements.get(id(self.anchor(statement)))
        return edit is not None and (edit.body is not None or edit.moved_away)

    def anchor(self, statement: cst.CSTNode) -> cst.CSTNode:
        """The statement above which one can write: an `elif` belongs to its `if`."""
        holder = self.tree.parent(statement)
        while isinstance(statement, cst.If) and isinstance(holder, cst.If):
            statement, holder = holder, self.tree.parent(holder)
        return statement

    def render(self, node: cst.CSTNode) -> str:
        """The source of `node` with all edits below it applied."""
        new = node.visit(Applier(self)) if id(node) in self.dirty else node
        assert isinstance(new, cst.CSTNode)
        return self.tree.module.code_for_node(new).strip()

    def rendered(self, node: Node) -> Node:
        """`node` itself with all edits in and below it applied."""
        new = node.visit(Applier(self)) if id(node) in self.dirty else node
        assert isinstance(new, cst.CSTNode)
        return new

    def pieces(self, block: cst.BaseSuite) -> list[Piece]:
        """The edited statements of a block, to be put elsewhere."""
        new = block.visit(Applier(self)) if id(block) in self.dirty else block
        if isinstance(new, cst.SimpleStatementSuite):
            return [cst.SimpleStatementLine([small]) for small in new.body]
        assert isinstance(new, cst.IndentedBlock)
        comments = [line for line in new.footer if line.comment is not None]
        return [*new.body, *comments]

    def apply(self) -> cst.Module:
        new = self.tree.module.visit(Applier(self))
        assert isinstance(new, cst.Module)
        return new

    def _edit(self, statement: cst.CSTNode) -> StatementEdit:
        statement = self.anchor(statement)
        self._mark(statement)
        return self.statements.setdefault(id(statement), StatementEdit())

    def _mark(self, node: cst.CSTNode) -> None:
        self.dirty.add(id(node))
        for above in self.tree.ancestors(node):
            if id(above) in self.dirty:
                break
            self.dirty.add(id(above))


def _copied(edits: dict[int, StatementEdit]) -> dict[int, StatementEdit]:
    """Copies whose lists can grow apart."""
    return {
        key: replace(
            edit,
            before=list(edit.before),
            after=list(edit.after),
            markers=list(edit.markers),
            moved_here=list(edit.moved_here),
            moved_below=list(edit.moved_below),
        )
        for key, edit in edits.items()
    }
