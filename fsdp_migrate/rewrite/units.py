"""
Which submodules become units of their own: FSDP1's wrap policies, read.

A policy that asks a module-by-module question becomes a predicate, written as a readable
condition. Any other (size-based, own functions, values that cannot be followed) stays the
callable it is; a helper in the user's file then walks the model as FSDP1 did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from fsdp_migrate.rewrite.api import Api
from fsdp_migrate.rewrite.edits import Edits
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import Names, dotted
from fsdp_migrate.rewrite.tree import Tree, walk
from fsdp_migrate.rewrite.values import argument, is_none

_BY_CLASS = {
    "transformer_auto_wrap_policy": "transformer_layer_cls",
    "_module_wrap_policy": "module_classes",
}
_SIZE = "size_based_auto_wrap_policy"
Substitution = dict[str, cst.BaseExpression]


@dataclass(frozen=True, slots=True)
class Units:
    """
    `predicate(variable)` is the condition for a submodule, or None and `policy()` is a callable
    of FSDP1's kind. `condition()` guards the whole, for `policy if cond else None`. `classes`
    are the unit classes where the predicate only asks for those. `read` are the nodes that the
    predicate replaces.
    """

    predicate: Callable[[str], str] | None
    policy: Callable[[], str]
    condition: Callable[[], str] | None = None
    classes: tuple[str, ...] = ()
    read: tuple[cst.CSTNode, ...] = field(default=())


class PolicyReader:
    def __init__(self, file: File) -> None:
        self.file = file

    def read(self, value: cst.BaseExpression) -> Units | None:
        """The units that a policy expression asks for; None for no policy."""
        if is_none(value):
            return None
        if isinstance(value, cst.IfExp) and is_none(value.orelse):
            inner = self.read(value.body)
            if inner is not None and inner.condition is None:
                test = value.test
                return Units(
                    inner.predicate,
                    inner.policy,
                    lambda: self.file.render(test),
                    inner.classes,
                    (value, *inner.read),
                )
        found = self._predicate(value, {}, depth=6)
        if found is not None:
            return found
        return Units(None, lambda: self.file.render(value))

    def _predicate(
        self, value: cst.BaseExpression, outer: Substitution, depth: int
    ) -> Units | None:
        if depth == 0:
            return None
        if isinstance(value, cst.Name) and value.value in outer:
            return self._predicate(outer[value.value], {}, depth - 1)
        if dotted(value):
            return self._variable(value, outer, depth)
        if not isinstance(value, cst.Call):
            return None
        name = self._policy_name(value.func)
        if name == "ModuleWrapPolicy" and (arg := argument(value, "module_classes", 0)):
            return self._by_class(arg.value, outer, (value,))
        if name == "CustomPolicy" and (arg := argument(value, "lambda_fn", 0)):
            return self._by_function(arg.value, outer, (value,))
        if self.file.is_call(value, "functools.partial") and value.args:
            return self._partial(value, outer, depth)
        return self._own_function(value, depth)

    def _variable(self, value: cst.BaseExpression, outer: Substitution, depth: int) -> Units | None:
        found = self.file.values.bindings(value)
        if len(found) != 1 or found[0].value is None or found[0].index is not None:
            return None
        inner = self._predicate(found[0].value, outer, depth - 1)
        if inner is None or not self._visible(found[0].value, value):
            return None
        return Units(inner.predicate, inner.policy, None, inner.classes, (value, *inner.read))

    def _visible(self, definition: cst.CSTNode, at: cst.CSTNode) -> bool:
        """Whether the names of a definition mean the same at another place."""
        for node in walk(definition):
            if isinstance(node, cst.Name):
                here = self.file.names.lookup(node.value, node)
                there = self.file.names.lookup(node.value, at)
                own = any(self.file.tree.inside(one.node, definition) for one in here)
                if here is not there and here != there and not own:
                    return False
        return True

    def _policy_name(self, node: cst.CSTNode) -> str | None:
        found: Api | None = self.file.api(node)
        return found.name if found and found.member is None else None

    def _partial(self, call: cst.Call, outer: Substitution, depth: int) -> Units | None:
        name = self._policy_name(call.args[0].value)
        if name in _BY_CLASS and (arg := argument(call, _BY_CLASS[name])):
            return self._by_class(arg.value, outer, (call,))
        if name == "lambda_auto_wrap_policy" and (arg := argument(call, "lambda_fn")):
            return self._by_function(arg.value, outer, (call,))
        if name == "_or_policy" and (arg := argument(call, "policies")):
            return self._any_of(arg.value, call, outer, depth)
        return None

    def _any_of(
        self, value: cst.BaseExpression, call: cst.Call, outer: Substitution, depth: int
    ) -> Units | None:
        value = self.file.values.only(value)
        if not isinstance(value, cst.List | cst.Tuple | cst.Set) or not value.elements:
            return None
        parts = [self._predicate(item.value, outer, depth - 1) for item in value.elements]
        known = [part for part in parts if part is not None and part.predicate is not None]
        if len(known) != len(parts):
            return None
        read = tuple(node for part in known for node in part.read)
        return Units(
            lambda var: " or ".join(part.predicate(var) for part in known if part.predicate),
            lambda: self.file.render(call),
            read=(call, *read),
        )

    def _by_class(
        self, value: cst.BaseExpression, outer: Substitution, read: tuple[cst.CSTNode, ...]
    ) -> Units | None:
        makes = self._classes(value, outer)
        if makes is None:
            return None

        def condition(variable: str) -> str:
            return f"isinstance({variable}, {makes()})"

        return Units(condition, lambda: self.file.render(read[0]), None, (makes(),), read)

    def _classes(self, value: cst.BaseExpression, outer: Substitution) -> Callable[[], str] | None:
        """The text of the second argument of isinstance."""
        render = self.file.render
        if isinstance(value, cst.Name) and value.value in outer:
            return self._classes(outer[value.value], {})
        plain = self.file.values.only(value)
        if plain is not value and self._visible(plain, value):
            value = plain
        if isinstance(value, cst.Set | cst.List | cst.Tuple):
            items = [self._substituted(item.value, outer) for item in value.elements]
            if any(isinstance(item, cst.StarredElement) for item in value.elements):
                return None
            if len(items) == 1:
                return lambda: render(items[0])
            return lambda: "(" + ", ".join(render(item) for item in items) + ")"
        if isinstance(value, cst.Call) and dotted(value.func) == "set" and len(value.args) == 1:
            return self._classes(value.args[0].value, outer)
        return lambda: f"tuple({render(value)})"

    @staticmethod
    def _substituted(value: cst.BaseExpression, outer: Substitution) -> cst.BaseExpression:
        return outer.get(value.value, value) if isinstance(value, cst.Name) else value

    def _by_function(
        self, value: cst.BaseExpression, outer: Substitution, read: tuple[cst.CSTNode, ...]
    ) -> Units | None:
        if isinstance(value, cst.Name) and value.value in outer:
            value, outer = outer[value.value], {}
        value = self.file.values.only(value)
        render = self.file.render
        policy = read[0]
        if isinstance(value, cst.Lambda) and len(value.params.params) == 1 and not outer:
            parameter = value.params.params[0].name.value
            body = value.body

            def inlined(variable: str) -> str:
                return _renamed(render(body), parameter, variable)

            return Units(inlined, lambda: render(policy), read=read)
        if not dotted(value) or outer:
            return None
        return Units(lambda var: f"{render(value)}({var})", lambda: render(policy), read=read)

    def _own_function(self, call: cst.Call, depth: int) -> Units | None:
        """A function of this file that does nothing but return a policy."""
        found = self.file.values.bindings(call.func)
        if len(found) != 1 or not isinstance(found[0].definition, cst.FunctionDef):
            return None
        function = found[0].definition
        returned = only_return(function)
        substitution = _bound_arguments(function, call)
        if returned is None or substitution is None or function.decorators:
            return None
        inner = self._predicate(returned, substitution, depth - 1)
        if inner is None or not self._closed(returned, substitution, function):
            return None
        return Units(
            inner.predicate,
            lambda: self.file.render(call),
            None,
            inner.classes,
            (call, call.func, *inner.read),
        )

    def _closed(
        self,
        returned: cst.BaseExpression,
        substitution: Substitution,
        function: cst.FunctionDef,
    ) -> bool:
        """Whether the returned expression names nothing local to the function but parameters."""
        tree, names = self.file.tree, self.file.names
        for node in walk(returned):
            if not isinstance(node, cst.Name) or node.value in substitution:
                continue
            local = any(tree.inside(one.node, function) for one in names.lookup(node.value, node))
            if local and not any(
                tree.inside(one.node, returned) for one in names.lookup(node.value, node)
            ):
                return False
        return True


def only_return(function: cst.FunctionDef) -> cst.BaseExpression | None:
    """The returned expression of a function that has no other statement but a docstring."""
    if not isinstance(function.body, cst.IndentedBlock):
        return None
    smalls = [
        small
        for line in function.body.body
        for small in (line.body if isinstance(line, cst.SimpleStatementLine) else [line])
    ]
    if smalls and isinstance(smalls[0], cst.Expr) and isinstance(smalls[0].value, cst.SimpleString):
        smalls = smalls[1:]
    if len(smalls) == 1 and isinstance(smalls[0], cst.Return):
        return smalls[0].value
    if len(smalls) == 2 and isinstance(smalls[0], cst.Assign) and isinstance(smalls[1], cst.Return):
        target = dotted(smalls[0].targets[0].target)
        if target is not None and target == dotted(smalls[1].value):
            return smalls[0].value
    return None


def _bound_arguments(function: cst.FunctionDef, call: cst.Call) -> Substitution | None:
    """The call's arguments by parameter name; None where defaults or stars hide them."""
    names = [param.name.value for param in function.params.params]
    bound: Substitution = {}
    for position, arg in enumerate(call.args):
        if arg.star:
            return None
        name = arg.keyword.value if arg.keyword else names[position : position + 1]
        if not name:
            return None
        bound[name if isinstance(name, str) else name[0]] = arg.value
    missing = set(names) - set(bound)
    return None if missing else bound


def renamed(text: str, old: str, new: str) -> str:
    """
    Code with `old`, a variable or a dotted path such as `self.model`, called `new`.

    Attributes and keywords of the same name keep it.
    """
    tree = Tree(cst.parse_module(f"{text}\n"))
    edits = Edits(tree)
    names = Names(tree)
    for node in (*tree.all(cst.Name), *tree.all(cst.Attribute)):
        above = tree.parent(node)
        label = isinstance(above, cst.Attribute) and above.attr is node
        label = label or (isinstance(above, cst.Arg) and above.keyword is node)
        if dotted(node) == old and not label and not names.lookup(old, node):
            edits.replace(node, lambda: new)
    return edits.apply().code.strip()


def _renamed(text: str, old: str, new: str) -> str:
    """The same for an expression, which may span lines."""
    code = renamed(f"({text})", old, new)
    return code[1:-1].strip() if code.startswith("(") else code
