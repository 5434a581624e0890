"""
Applying edits: one pass over the tree that rebuilds edited statements and leaves all others.

Comments of a rewritten statement that its new text lacks are put above it; a statement that goes
leaves its comments to the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst import matchers

if TYPE_CHECKING:
    from fsdp_migrate.rewrite.edits import Edits, StatementEdit

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


class Applier(cst.CSTTransformer):
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
