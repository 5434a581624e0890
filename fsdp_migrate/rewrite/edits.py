"""
Edits of a module: asked for by rules on original nodes, applied together in one pass.

Only edited statements are built anew; all others stay the very objects that were parsed, so
their bytes cannot change. An edit is a function that gives the new source text; it is called
when the edit is applied and renders the parts it keeps through `render`, so that edits nest:
a rewritten call may hold rewritten arguments. Comments of an edited statement that its new text
lacks are put above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import libcst as cst
from libcst import matchers

from fsdp_migrate.rewrite.tree import Node, Tree

Piece = str | cst.BaseStatement | cst.EmptyLine
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
_LOOSE = (
    cst.IfExp,
    cst.BinaryOperation,
    cst.BooleanOperation,
    cst.UnaryOperation,
    cst.Comparison,
    cst.Lambda,
    cst.NamedExpr,
    cst.Await,
)
_ROOMY = (cst.Arg, cst.Assign, cst.AnnAssign, cst.Return, cst.Expr, cst.Element, cst.DictElement)


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
        new = node.visit(_Applier(self)) if id(node) in self.dirty else node
        assert isinstance(new, cst.CSTNode)
        return self.tree.module.code_for_node(new).strip()

    def rendered(self, node: Node) -> Node:
        """`node` itself with all edits in and below it applied."""
        new = node.visit(_Applier(self)) if id(node) in self.dirty else node
        assert isinstance(new, cst.CSTNode)
        return new

    def pieces(self, block: cst.BaseSuite) -> list[Piece]:
        """The edited statements of a block, to be put elsewhere."""
        new = block.visit(_Applier(self)) if id(block) in self.dirty else block
        if isinstance(new, cst.SimpleStatementSuite):
            return [cst.SimpleStatementLine([small]) for small in new.body]
        assert isinstance(new, cst.IndentedBlock)
        comments = [line for line in new.footer if line.comment is not None]
        return [*new.body, *comments]

    def apply(self) -> cst.Module:
        new = self.tree.module.visit(_Applier(self))
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


class _Applier(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits = edits
        self.module = edits.tree.module

    def on_visit(self, node: cst.CSTNode) -> bool:
        if id(node) in self.edits.replaced:
            return False
        edit = self.edits.statements.get(id(node))
        return id(node) in self.edits.dirty and (edit is None or edit.body is None)

    def on_leave(self, original: Any, updated: Any) -> Any:
        if id(original) in self.edits.replaced:
            return self._expression(original)
        if id(original) not in self.edits.dirty:
            return updated
        if isinstance(original, cst.Module):
            body, rest = self._block(original.body, updated.body)
            footer = (*rest, *updated.footer)
            return updated.with_changes(body=body, footer=footer)
        if isinstance(original, cst.IndentedBlock):
            body, rest = self._block(original.body, updated.body)
            return updated.with_changes(body=body, footer=(*rest, *updated.footer))
        if isinstance(original, cst.SimpleStatementSuite):
            return self._suite(original, updated)
        return updated

    def _expression(self, original: cst.CSTNode) -> cst.BaseExpression:
        text = self.edits.replaced[id(original)]()
        newline = self.module.default_newline
        text = text.replace("\r\n", "\n").replace("\n", newline)
        # In parentheses, so that a text of several lines parses wherever it came from.
        new = cst.parse_expression(f"({text})", config=self.module.config_for_parsing)
        assert isinstance(new, cst.BaseExpression)
        roomy = isinstance(self.edits.tree.parent(original), _ROOMY)
        if isinstance(new, _LOOSE) and not roomy:
            return new
        bare = new.with_changes(lpar=new.lpar[1:], rpar=new.rpar[:-1])
        assert isinstance(bare, cst.BaseExpression)
        return bare

    def _suite(
        self, original: cst.SimpleStatementSuite, updated: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        if not any(id(small) in self.edits.statements for small in original.body):
            return updated
        pairs = zip(original.body, updated.body, strict=True)
        lines = [(old, cst.SimpleStatementLine([new])) for old, new in pairs]
        body, rest = self._arrange([(old, new, ()) for old, new in lines])
        return cst.IndentedBlock(body=body, footer=rest)

    def _block(
        self, originals: Sequence[Any], updates: Sequence[Any]
    ) -> tuple[list[Statement], list[cst.EmptyLine]]:
        if not any(self._touched(original) for original in originals):
            return list(updates), []
        items: list[tuple[cst.CSTNode, Any, Sequence[cst.EmptyLine]]] = []
        for original, updated in zip(originals, updates, strict=True):
            items.extend(self._split(original, updated))
        return self._arrange(items)

    def _touched(self, original: cst.CSTNode) -> bool:
        if isinstance(original, cst.SimpleStatementLine):
            return id(original) in self.edits.dirty
        return id(original) in self.edits.statements

    def _split(self, original: Any, updated: Any) -> list[tuple[cst.CSTNode, Any, Any]]:
        """One entry a small statement, if an edit sets them apart: (key, new, leading lines)."""
        if not isinstance(original, cst.SimpleStatementLine):
            return [(original, updated, updated.leading_lines)]
        apart = any(id(small) in self.edits.statements for small in original.body)
        if not apart or len(original.body) == 1:
            updated = _keep_comments(original, updated)
            return [(original.body[0], updated, updated.leading_lines)]
        entries: list[tuple[cst.CSTNode, Any, Any]] = []
        for position, (old, new) in enumerate(zip(original.body, updated.body, strict=True)):
            last = position == len(original.body) - 1
            tail = original.trailing_whitespace if last else cst.TrailingWhitespace()
            small = new.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
            line = cst.SimpleStatementLine([small], trailing_whitespace=tail)
            entries.append((old, line, () if position else original.leading_lines))
        return entries

    def _arrange(
        self, items: list[tuple[cst.CSTNode, Any, Sequence[cst.EmptyLine]]]
    ) -> tuple[list[Statement], list[cst.EmptyLine]]:
        by_id = {id(key): (key, new, lead) for key, new, lead in items}
        result: list[Statement] = []
        loose: list[cst.EmptyLine] = []
        for key, new, lead in items:
            edit = self.edits.statements.get(id(key))
            if edit is not None and edit.moved_away:
                loose = loose or _blank(lead)[0]
                continue
            for moved in edit.moved_here if edit else ():
                blank, lead = _blank(lead)
                old, moving, comments = by_id[id(moved)]
                made, loose = self._produce(old, moving, [*blank, *_blank(comments)[1]], loose)
                result.extend(made)
            made, loose = self._produce(key, new, lead, loose)
            result.extend(made)
            for moved in edit.moved_below if edit else ():
                old, moving, comments = by_id[id(moved)]
                made, loose = self._produce(old, moving, _blank(comments)[1], loose)
                result.extend(made)
        if not result:
            result.append(cst.SimpleStatementLine([cst.Pass()]))
        return result, [line for line in loose if line.comment is not None]

    def _produce(
        self, key: cst.CSTNode, new: Any, lead: Sequence[cst.EmptyLine], loose: list[cst.EmptyLine]
    ) -> tuple[list[Statement], list[cst.EmptyLine]]:
        """The statements that stand for `key`, and comment lines left over for the next one."""
        edit = self.edits.statements.get(id(key))
        if any(line.comment is None for line in lead[:1]):
            loose = [line for line in loose if line.comment is not None]
        if edit is None:
            return [_led(new, [*loose, *lead])], []
        made: list[Any] = [
            node for make in edit.before if (text := make()) for node in self.parse(text)
        ]
        core = self._core(edit, new)
        core_nodes = [node for node in core if not isinstance(node, cst.EmptyLine)]
        if edit.body is not None and len(core_nodes) == 1 and _is_line(new, core_nodes[0]):
            tail = new.trailing_whitespace
            core = [node.with_changes(trailing_whitespace=tail) for node in core_nodes]
        if edit.body is not None:
            lost = _lost_comments(new, core)
            lead = [*lead, *(_comment_line(text) for text in lost)]
        made += core
        made += [node for make in edit.after for node in self.parse(make())]
        blank = [cst.EmptyLine(indent=False)] * edit.blank_lines
        return self._settle(made, [*loose, *blank, *lead], edit.markers)

    def _core(self, edit: StatementEdit, new: Any) -> list[Any]:
        if edit.body is None:
            return [new.with_changes(leading_lines=())]
        core: list[Any] = []
        for piece in edit.body():
            core.extend(self.parse(piece) if isinstance(piece, str) else [piece])
        return core

    def _settle(
        self, made: list[Any], lead: list[cst.EmptyLine], markers: list[str]
    ) -> tuple[list[Statement], list[cst.EmptyLine]]:
        present = {line.comment.value for line in lead if line.comment is not None}
        lead += [_comment_line(text) for text in markers if not _marked(text, present)]
        statements: list[Statement] = []
        for node in made:
            if isinstance(node, cst.EmptyLine):
                lead.append(node)
            else:
                statements.append(_led(node, [*lead, *node.leading_lines]))
                lead = []
        if statements:
            return statements, lead
        return [], lead

    def parse(self, text: str) -> list[Any]:
        module = self.module
        if '"""' not in text and "'''" not in text:
            text = "\n".join(_indented(line, module.default_indent) for line in text.split("\n"))
        text = text.replace("\r\n", "\n").replace("\n", module.default_newline)
        newline = module.default_newline
        parsed = cst.parse_module(f"pass{newline}{text}{newline}", module.config_for_parsing)
        return list(parsed.body[1:])


def _blank(lines: Sequence[cst.EmptyLine]) -> tuple[list[cst.EmptyLine], list[cst.EmptyLine]]:
    """The blank lines that open `lines`, and the rest."""
    count = next((n for n, line in enumerate(lines) if line.comment is not None), len(lines))
    return list(lines[:count]), list(lines[count:])


def _indented(line: str, unit: str) -> str:
    bare = line.lstrip(" ")
    steps, rest = divmod(len(line) - len(bare), 4)
    return unit * steps + " " * rest + bare


def _led(node: Any, lines: Sequence[cst.EmptyLine]) -> Any:
    return node.with_changes(leading_lines=tuple(lines))


def _is_line(*nodes: cst.CSTNode) -> bool:
    return all(isinstance(node, cst.SimpleStatementLine) for node in nodes)


def _comment_line(text: str) -> cst.EmptyLine:
    return cst.EmptyLine(indent=True, comment=cst.Comment(text))


def _marked(text: str, present: set[str]) -> bool:
    """A marker of the same rule already stands here, whatever it says."""
    head = " ".join(text.split(" ")[:3])
    return any(one == text or one.startswith(f"{head} ") for one in present)


def _comments(nodes: Sequence[cst.CSTNode]) -> list[str]:
    found = [comment for node in nodes for comment in matchers.findall(node, matchers.Comment())]
    return [comment.value for comment in found if isinstance(comment, cst.Comment)]


def _lost_comments(old: Any, new: Sequence[cst.CSTNode]) -> list[str]:
    left = Counter(_comments(new))
    lost = []
    for text in _comments([old.with_changes(leading_lines=())]):
        if left[text] > 0:
            left[text] -= 1
        else:
            lost.append(text)
    return lost


def _keep_comments(original: Any, updated: Any) -> Any:
    if updated is original:
        return updated
    lines = [_comment_line(text) for text in _lost_comments(original, [updated])]
    return _led(updated, [*updated.leading_lines, *lines]) if lines else updated
