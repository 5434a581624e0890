"""
A parsed module with what libcst leaves to metadata: parents, statements, scopes, lines.

One plain walk in document order computes all of it; libcst's own scope metadata costs ten times
as much, and whitespace nodes are of no interest here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst

from fsdp_migrate.rewrite.lines import lines_of

Node = TypeVar("Node", bound=cst.CSTNode)
Function = cst.FunctionDef | cst.Lambda
SCOPES = (
    cst.FunctionDef,
    cst.ClassDef,
    cst.Lambda,
    cst.ListComp,
    cst.SetComp,
    cst.DictComp,
    cst.GeneratorExp,
)
_WHITESPACE = {
    "leading_lines",
    "lines_after_decorators",
    "lpar",
    "rpar",
    "lbrace",
    "rbrace",
    "lbracket",
    "rbracket",
    "comma",
    "semicolon",
    "header",
    "footer",
    "trailing_whitespace",
    "dot",
    "colon",
    "equal",
}
_fields: dict[type, tuple[str, ...]] = {}
_EXPRESSIONS = (cst.Arg, cst.Parameters, cst.AssignTarget, cst.Decorator, cst.WithItem)
_statements: dict[type, bool] = {}
_nodes: dict[type, bool] = {}  # whether a type is a node's; asking an ABC each time is slow


def _is_node(kind: type) -> bool:
    if kind not in _nodes:
        _nodes[kind] = issubclass(kind, cst.CSTNode)
    return _nodes[kind]


def _is_statement(kind: type) -> bool:
    """Whether statements can stand in a node of this type, or it is part of an import."""
    if kind not in _statements:
        _statements[kind] = not issubclass(kind, (cst.BaseExpression, *_EXPRESSIONS))
    return _statements[kind]


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The meaningful children of `node` in document order, without whitespace."""
    kind = type(node)
    names = _fields.get(kind)
    if names is None:
        names = _fields[kind] = _meaningful(kind)
    found: list[cst.CSTNode] = []
    for name in names:
        value = getattr(node, name)
        if value is None:
            continue
        if value.__class__ in (tuple, list):
            found += [item for item in value if _is_node(item.__class__)]
        elif _is_node(value.__class__):
            found.append(value)
    return found


def _meaningful(kind: type) -> tuple[str, ...]:
    """The fields of a node type that hold other nodes; decorators stand before what they adorn."""
    names = [
        field.name
        for field in dataclasses.fields(kind)
        if not field.name.startswith("whitespace") and field.name not in _WHITESPACE
    ]
    return tuple(sorted(names, key=lambda name: name != "decorators"))


def walk(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`root` and all below it, in document order, at any depth."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


class Tree:
    """
    `module` must not hold one node twice; what libcst parses never does. With `shallow` only
    statements and imports are walked, not expressions.
    """

    def __init__(self, module: cst.Module, *, shallow: bool = False) -> None:
        self.module = module
        self.parents: dict[int, cst.CSTNode] = {}
        self.nodes: list[cst.CSTNode] = []
        self.order: dict[int, int] = {}
        self._by_type: dict[type, list[cst.CSTNode]] = {}
        stack: list[cst.CSTNode] = [module]
        while stack:
            node = stack.pop()
            self._by_type.setdefault(type(node), []).append(node)
            self.order[id(node)] = len(self.nodes)
            self.nodes.append(node)
            below = children(node)
            if shallow:
                below = [child for child in below if _is_statement(child.__class__)]
            for child in below:
                self.parents[id(child)] = node
            stack.extend(reversed(below))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self.parents.get(id(node))

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def nearest(self, node: cst.CSTNode, kind: type[Node] | tuple[type[Node], ...]) -> Node | None:
        """The closest node above `node` of one of these types."""
        return next((above for above in self.ancestors(node) if isinstance(above, kind)), None)

    def all(self, kind: type[Node] | tuple[type[Node], ...]) -> list[Node]:
        """All nodes of a type, or of several, in document order."""
        lists: list[list[Any]] = [
            found for one, found in self._by_type.items() if issubclass(one, kind)
        ]
        if len(lists) == 1:
            return lists[0]
        nodes = [node for found in lists for node in found]
        return sorted(nodes, key=lambda node: self.order[id(node)])

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The small or compound statement that `node` is, or stands in."""
        for candidate in (node, *self.ancestors(node)):
            if isinstance(candidate, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return candidate
        raise AssertionError("only the module itself stands in no statement")

    def block(self, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """The statements that run one after the other with `statement`, itself included."""
        holder = self.parent(statement)
        if isinstance(holder, cst.SimpleStatementLine):
            holder = self.parent(holder)
        if isinstance(holder, cst.SimpleStatementSuite):
            return list(holder.body)
        if not isinstance(holder, cst.Module | cst.IndentedBlock):
            return [statement]  # an `elif` stands in its `if`
        found: list[cst.CSTNode] = []
        for item in holder.body:
            found.extend(item.body if isinstance(item, cst.SimpleStatementLine) else [item])
        return found

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        return self.nearest(node, cst.FunctionDef)

    def before(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        return self.order[id(one)] < self.order[id(other)]

    def inside(self, node: cst.CSTNode, holder: cst.CSTNode) -> bool:
        return node is holder or any(above is holder for above in self.ancestors(node))

    @cached_property
    def _lines(self) -> dict[int, tuple[int, int]]:
        return lines_of(self.module)

    def line(self, node: cst.CSTNode) -> int:
        """The line `node` starts on, one-based."""
        while id(node) not in self._lines:
            node = self.parents[id(node)]
        return self._lines[id(node)][0]

    def last_line(self, node: cst.CSTNode) -> int:
        while id(node) not in self._lines:
            node = self.parents[id(node)]
        return self._lines[id(node)][1]

    def code(self, node: cst.CSTNode) -> str:
        """The source of `node` alone, without comments that lead it."""
        return self.module.code_for_node(node).strip()
