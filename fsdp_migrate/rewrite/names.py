"""
What a name means where it stands: Python's scoping, for imports and for values.

A name is looked up from the scope of its use outwards, skipping class bodies, as Python does.
Where a scope binds it more than once, all bindings count: branches are not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.tree import SCOPES, Tree, walk

_BINDERS = frozenset(
    {
        *SCOPES,
        cst.Param,
        cst.Import,
        cst.ImportFrom,
        cst.Assign,
        cst.AnnAssign,
        cst.NamedExpr,
        cst.AugAssign,
        cst.For,
        cst.CompFor,
        cst.AsName,
        cst.Global,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """
    One place that gives a name a value.

    `qualified` is set for imports; `value` for assignments, with `index` when it is one element
    of an unpacked value; `definition` for functions, classes and parameters.
    """

    node: cst.CSTNode
    qualified: str | None = None
    value: cst.BaseExpression | None = None
    index: int | None = None
    definition: cst.FunctionDef | cst.ClassDef | cst.Param | None = None
    opaque: bool = False  # a value nobody can see: loop variable, `with ... as`, augmented


@dataclass(slots=True, eq=False)
class Scope:
    node: cst.CSTNode
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # "self.model", "cfg.x"
    stars: list[tuple[str, cst.CSTNode]] = field(default_factory=list)

    def bind(self, name: str, binding: Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)


class Names:
    """`package` is the dotted package of the file, for relative imports; "" when unknown."""

    def __init__(self, tree: Tree, package: str = "") -> None:
        self.tree = tree
        self.package = package
        self.top = Scope(tree.module, None)
        self._scopes: dict[int, Scope] = {id(tree.module): self.top}
        self._imports: list[tuple[str, str]] | None = None
        self._global: set[tuple[int, str]] = set()
        for node in tree.nodes:
            if type(node) in _BINDERS:
                self._collect(node)

    def imported(self) -> set[str]:
        """The dotted origin of everything the file imports, in any scope."""
        return {origin for _, origin in self.import_bindings()}

    def import_bindings(self) -> list[tuple[str, str]]:
        """(local name, dotted origin) of everything the file imports, in any scope."""
        if self._imports is None:
            self._imports = [
                (name, binding.qualified)
                for scope in self._scopes.values()
                for name, bindings in scope.bindings.items()
                for binding in bindings
                if binding.qualified
            ]
        return self._imports

    def import_statements(self) -> list[tuple[str, cst.CSTNode]]:
        """(local name, import statement) of everything the file imports."""
        return [
            (name, binding.node)
            for scope in self._scopes.values()
            for name, bindings in scope.bindings.items()
            for binding in bindings
            if binding.qualified
        ]

    def scope(self, node: cst.CSTNode) -> Scope:
        """The scope `node` is evaluated in; a function's own name stands in the scope around."""
        for above in self.tree.ancestors(node):
            if id(above) in self._scopes:
                return self._scopes[id(above)]
        return self.top

    def lookup(self, name: str, at: cst.CSTNode) -> list[Binding]:
        """The bindings of `name` in the innermost scope that has it; [] if none has."""
        scope: Scope | None = self.scope(at)
        innermost = True
        while scope is not None:
            hidden = isinstance(scope.node, cst.ClassDef) and not innermost
            if name in scope.bindings and not hidden:
                return scope.bindings[name]
            innermost = False
            scope = scope.parent
        for module, statement in self.top.stars:
            if api.find(f"{module}.{name}"):
                return [Binding(statement, qualified=f"{module}.{name}")]
        return []

    def qualified(self, node: cst.CSTNode) -> str | None:
        """
        The dotted origin of a name or attribute chain; None unless imports alone decide it.

        `X = None` beside an import (`except ImportError`) does not make it doubtful; a second
        import from another home, a class or any other value does.
        """
        text = dotted(node)
        if text is None:
            return None
        head, _, rest = text.partition(".")
        origins = set()
        for binding in self.lookup(head, node):
            if binding.qualified is not None:
                origins.add(binding.qualified)
            elif not (isinstance(binding.value, cst.Name) and binding.value.value == "None"):
                return None
        found = {f"{origin}.{rest}" if rest else origin for origin in origins}
        same = {api.find(one) or one for one in found}
        return min(found) if len(same) == 1 else None

    def attribute(self, text: str, at: cst.CSTNode) -> list[Binding]:
        """The assignments to a dotted name such as `self.model`, class-wide for `self`."""
        scope: Scope | None = self.scope(at)
        while scope is not None:
            if text in scope.attributes:
                return scope.attributes[text]
            scope = scope.parent
        return []

    def _collect(self, node: cst.CSTNode) -> None:
        if isinstance(node, SCOPES):
            outer = self.scope(node)
            self._scopes[id(node)] = Scope(node, outer)
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                outer.bind(node.name.value, Binding(node, definition=node))
        elif isinstance(node, cst.Param):
            self.scope(node).bind(node.name.value, Binding(node, definition=node))
        elif isinstance(node, cst.Import | cst.ImportFrom):
            self._collect_import(node)
        elif isinstance(node, cst.Assign):
            for target in node.targets:
                self._bind_target(target.target, node, node.value)
        elif (isinstance(node, cst.AnnAssign) and node.value is not None) or isinstance(
            node, cst.NamedExpr
        ):
            self._bind_target(node.target, node, node.value)
        elif isinstance(node, cst.AugAssign | cst.For | cst.CompFor):
            self._bind_target(node.target, node, None)
        elif isinstance(node, cst.AsName):
            if isinstance(self.tree.parent(node), cst.WithItem | cst.ExceptHandler):
                self._bind_target(node.name, node, None)
        elif isinstance(node, cst.Global):
            for item in node.names:
                self._global.add((id(self.scope(node)), item.name.value))

    def _bind_target(
        self,
        target: cst.BaseExpression,
        node: cst.CSTNode,
        value: cst.BaseExpression | None,
        index: int | None = None,
    ) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            parts = _elements(value) if value is not None else None
            for position, element in enumerate(target.elements):
                if parts is not None and len(parts) == len(target.elements):
                    self._bind_target(element.value, node, parts[position])
                else:
                    self._bind_target(element.value, node, value, position)
            return
        binding = Binding(node, value=value, index=index, opaque=value is None)
        scope = self.scope(node)
        if isinstance(target, cst.Name):
            if (id(scope), target.value) in self._global:
                scope = self.top
            scope.bind(target.value, binding)
        elif isinstance(target, cst.Attribute) and (text := dotted(target)):
            self._attribute_scope(text, scope).attributes.setdefault(text, []).append(binding)

    def _attribute_scope(self, text: str, scope: Scope) -> Scope:
        if text.startswith("self."):
            holder: Scope | None = scope
            while holder is not None:
                if isinstance(holder.node, cst.ClassDef):
                    return holder
                holder = holder.parent
        return scope

    def _collect_import(self, node: cst.Import | cst.ImportFrom) -> None:
        scope = self.scope(node)
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = dotted(alias.name) or ""
                bound = bound_name(alias)
                scope.bind(bound, Binding(node, qualified=name if alias.asname else bound))
            return
        module = self.module_of(node)
        if isinstance(node.names, cst.ImportStar):
            self.top.stars.append((module, node))
            return
        for alias in node.names:
            qualified = f"{module}.{dotted(alias.name)}"
            scope.bind(bound_name(alias), Binding(node, qualified=qualified))

    def module_of(self, node: cst.ImportFrom) -> str:
        """The absolute module of `from ... import`, as far as the package is known."""
        name = dotted(node.module) if node.module is not None else None
        if not node.relative:
            return name or ""
        parts = self.package.split(".") if self.package else []
        base = parts[: len(parts) - (len(node.relative) - 1)]
        return ".".join([*base, *([name] if name else [])]) or "."


def dotted(node: cst.CSTNode | None) -> str | None:
    """`a.b.c` as text; None for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def bound_name(alias: cst.ImportAlias) -> str:
    """The name an import binds: `as` name, or for `import a.b` the first part."""
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return (dotted(alias.name) or "").split(".")[0]


def string_value(node: cst.CSTNode | None) -> str | None:
    """The text of a plain string literal."""
    if isinstance(node, cst.SimpleString) and "b" not in node.prefix.lower():
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def names_in(node: cst.CSTNode) -> Iterator[str]:
    """Every bare name read or written below `node`; attribute and keyword names are not."""
    skip: set[int] = set()
    for inner in walk(node):
        if isinstance(inner, cst.Attribute):
            skip.add(id(inner.attr))
        elif isinstance(inner, cst.Arg) and inner.keyword is not None:
            skip.add(id(inner.keyword))
        elif isinstance(inner, cst.Name) and id(inner) not in skip:
            yield inner.value


def _elements(value: cst.BaseExpression) -> list[cst.BaseExpression] | None:
    if isinstance(value, cst.Tuple | cst.List):
        return [element.value for element in value.elements]
    return None
