"""Where a value comes from: a variable's definitions, as far as they are plain to see."""

from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.names import Binding, Names, dotted
from fsdp_migrate.rewrite.tree import Tree, walk

_DEPTH = 8


class Values:
    def __init__(self, tree: Tree, names: Names) -> None:
        self.tree = tree
        self.names = names
        self.consumed: dict[int, cst.CSTNode] = {}

    def consume(self, node: cst.CSTNode) -> None:
        """What `node` reads is something that the rewritten code no longer asks for."""
        for inner in walk(node):
            self.consumed[id(inner)] = inner

    def bindings(self, node: cst.CSTNode) -> list[Binding]:
        """Everything that may have given the name or attribute at `node` its value."""
        if isinstance(node, cst.Name):
            return self.names.lookup(node.value, node)
        text = dotted(node)
        return self.names.attribute(text, node) if text else []

    def reaching(self, node: cst.BaseExpression) -> list[Binding]:
        """
        The bindings that `node` may read: the nearest one above where it is plain to see that
        it is the one, else all.
        """
        found = self.bindings(node) if dotted(node) else []
        if len(found) < 2 or not isinstance(node, cst.Name):
            return found
        above = [
            one
            for one in found
            if self.tree.before(one.node, node) and not self.tree.inside(node, one.node)
        ]
        if not above or self.tree.function(above[-1].node) is not self.tree.function(node):
            return found
        nearest = max(above, key=lambda one: self.tree.order[id(one.node)])
        block = self._block(nearest.node)
        if block is None or not self.tree.inside(node, block):
            return found
        for loop in self.tree.ancestors(node):
            if loop is block:
                break
            if isinstance(loop, cst.For | cst.While) and any(
                self.tree.inside(one.node, loop) for one in found
            ):
                return found
        return [nearest]

    def _block(self, node: cst.CSTNode) -> cst.CSTNode | None:
        if isinstance(node, cst.Assign | cst.AnnAssign):
            line = self.tree.parent(node)
            return self.tree.parent(line) if line is not None else None
        return None

    def only(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Follow variables with exactly one visible definition to the expression behind them."""
        for _ in range(_DEPTH):
            found = self.reaching(node)
            if len(found) != 1 or found[0].value is None or found[0].index is not None:
                return node
            node = found[0].value
        return node

    def leaves(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """
        The expressions whose value `node` may have: all definitions of a variable, both
        branches of a conditional. What cannot be followed stands for itself.
        """
        return self._leaves(node, _DEPTH)

    def _leaves(self, node: cst.BaseExpression, depth: int) -> list[cst.BaseExpression]:
        if isinstance(node, cst.IfExp):
            return self._leaves(node.body, depth) + self._leaves(node.orelse, depth)
        if isinstance(node, cst.BooleanOperation):
            return self._leaves(node.left, depth) + self._leaves(node.right, depth)
        found = self.reaching(node) if depth else []
        if not found or any(one.value is None or one.index is not None for one in found):
            return [node]
        return [leaf for one in found if one.value for leaf in self._leaves(one.value, depth - 1)]

    def reads(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Every read of the variable or attribute that `node` means."""
        if isinstance(node, cst.Name):
            return list(self.uses(node.value, node))
        text = dotted(node)
        found = self.names.attribute(text, node) if text else []
        return [
            other
            for other in self.tree.all(cst.Attribute)
            if dotted(other) == text
            and not isinstance(self.tree.parent(other), cst.AssignTarget)
            and self.names.attribute(text or "", other) is found
        ]

    def uses(self, binding_name: str, at: cst.CSTNode) -> list[cst.Name]:
        """Every read of the variable that `binding_name` means at `at`."""
        bindings = self.names.lookup(binding_name, at)
        return [
            node
            for node in self.tree.all(cst.Name)
            if node.value == binding_name
            and not isinstance(self.tree.parent(node), cst.AssignTarget | cst.Param)
            and not self._is_label(node)
            and self.names.lookup(binding_name, node) is bindings
        ]

    def _is_label(self, node: cst.Name) -> bool:
        above = self.tree.parent(node)
        if isinstance(above, cst.Attribute):
            return above.attr is node
        if isinstance(above, cst.FunctionDef | cst.ClassDef):
            return above.name is node
        if isinstance(above, cst.ImportAlias | cst.ImportFrom | cst.AsName):
            return True
        return isinstance(above, cst.Arg) and above.keyword is node


def is_none(node: cst.CSTNode | None) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def truth(node: cst.CSTNode | None) -> bool | None:
    """The value of a literal True or False (or 0, 1); None when it is anything else."""
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    if isinstance(node, cst.Integer):
        return node.evaluated_value != 0
    return None


def argument(call: cst.Call, name: str, position: int | None = None) -> cst.Arg | None:
    """A call's argument by keyword, or by position where no star hides positions."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
    if position is None:
        return None
    plain = [arg for arg in call.args if arg.keyword is None and not arg.star]
    starred = any(arg.star == "*" for arg in call.args)
    return plain[position] if not starred and position < len(plain) else None
