"""
Imports, edited where they stand.

After all edits, `settle` takes out what nothing refers to any more and puts in what is needed,
beside the import it belongs to; then the helper functions the rewritten code calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.edits import Edits
from fsdp_migrate.rewrite.names import Names, bound_name, dotted, string_value
from fsdp_migrate.rewrite.needs import Needs, Wanted
from fsdp_migrate.rewrite.tree import Tree, children, walk

_WIDTH = 88
_LONGEST = 200  # no annotation or name in a string is longer


@dataclass(frozen=True, slots=True)
class Kept:
    """What must stay although this file does not use it: names other files import from here."""

    path: str
    exported: frozenset[str]


Reference = tuple[int, str]  # (id of an import statement, local name)


@dataclass(frozen=True, slots=True)
class References:
    """What the code of a file, its `__all__` and its annotations refer to, before any edit."""

    tree: Tree
    names: Names
    spoken: list[tuple[cst.CSTNode, str]]

    def before(self) -> set[Reference]:
        return self._of(self.spoken)

    def after(self, module: cst.Module) -> set[Reference]:
        """
        The same once edits are applied: what stands in untouched parts, and whatever a new part
        names, by the name alone.
        """
        untouched, new = self._parts(module)
        kept = [
            (node, text)
            for node, text in self.spoken
            if id(node) in untouched
            or any(id(above) in untouched for above in self.tree.ancestors(node))
        ]
        found = self._of(kept)
        for scope_name, statement in self.names.import_statements():
            if scope_name in new:
                found.add((id(statement), scope_name))
        return found

    def _of(self, spoken: list[tuple[cst.CSTNode, str]]) -> set[Reference]:
        lookup = self.names.lookup
        return {(id(one.node), text) for node, text in spoken for one in lookup(text, node)}

    def _parts(self, module: cst.Module) -> tuple[set[int], set[str]]:
        """The ids of the largest untouched parts, and the words of all new ones."""
        untouched: set[int] = set()
        new: set[str] = set()
        stack: list[cst.CSTNode] = [module]
        while stack:
            node = stack.pop()
            if id(node) in self.tree.order and node is not self.tree.module:
                untouched.add(id(node))
            elif isinstance(node, cst.Name):
                new.add(node.value)
            elif isinstance(node, cst.SimpleString):
                new.update(_words(string_value(node) or ""))
            else:
                stack.extend(children(node))
        return untouched, new


def references(tree: Tree, names: Names) -> References:
    """Every use of an imported name."""
    imported = {name for name, _ in names.import_bindings()}
    spoken: list[tuple[cst.CSTNode, str]] = [
        (node, node.value)
        for node in tree.all(cst.Name)
        if node.value in imported and not _names_something(tree, node)
    ]
    for string in tree.all(cst.SimpleString):
        if len(string.value) < _LONGEST and _speaks_of_names(tree, string):
            words = _words(string_value(string) or "")
            spoken += [(string, word) for word in words if word in imported]
    return References(tree, names, spoken)


def settle(module: cst.Module, needs: Needs, uses: References, kept: Kept) -> cst.Module:
    """Take out imports that lost their last use, put in what is needed, add the snippets."""
    tree = Tree(module, shallow=True)
    edits = Edits(tree)
    before, after = uses.before(), uses.after(module)
    _join_existing(tree, needs)
    statements: list[cst.Import | cst.ImportFrom] = [
        node for node in tree.nodes if isinstance(node, cst.Import | cst.ImportFrom)
    ]
    for node in statements:
        wanted = needs.wanted.pop(id(node), {})
        _settle_one(node, wanted, before, after, kept, edits)
    rest: Wanted = {}
    for wanted in needs.wanted.values():
        rest.update(wanted)
    last = _last_import(module)
    added = _import_lines(rest)
    snippets = [f"\n\n{text.strip()}" for text in needs.snippets.values()]
    if last is not None and (added or snippets):
        edits.after(last, lambda: "\n".join([*added, *snippets]))
        _space_after(last, module, edits, bool(snippets))
        return edits.apply()
    return edits.apply() if edits else module


def _join_existing(tree: Tree, needs: Needs) -> None:
    """Let a name join an import from the same module that stands in the same block."""
    imports = {id(node): node for node in tree.all(cst.ImportFrom)}
    others = {id(node): node for node in tree.all(cst.Import)}
    for anchor, wanted in list(needs.wanted.items()):
        node = imports.get(anchor) or others.get(anchor) if anchor is not None else None
        block = tree.block(node) if node is not None else _top(tree.module)
        for other in block:
            if not isinstance(other, cst.ImportFrom) or isinstance(other.names, cst.ImportStar):
                continue
            module = dotted(other.module) if not other.relative else None
            for key in [key for key in wanted if key[1] and key[0] == module]:
                needs.wanted.setdefault(id(other), {})[key] = (
                    wanted.pop(key) if (other is not node) else wanted[key]
                )


def _top(module: cst.Module) -> list[cst.CSTNode]:
    lines = [line for line in module.body if isinstance(line, cst.SimpleStatementLine)]
    return [small for line in lines for small in line.body]


def _settle_one(
    node: cst.Import | cst.ImportFrom,
    wanted: Wanted,
    before: set[tuple[int, str]],
    after: set[tuple[int, str]],
    kept: Kept,
    edits: Edits,
) -> None:
    if isinstance(node.names, cst.ImportStar):
        if wanted:
            edits.after(node, lambda: "\n".join(_import_lines(wanted)))
        return
    gone = [alias for alias in node.names if _is_gone(node, alias, before, after, kept)]
    here: Wanted = {}
    if isinstance(node, cst.ImportFrom) and not node.relative:
        module = dotted(node.module)
        here = {key: local for key, local in wanted.items() if key[0] == module}
    other = {key: local for key, local in wanted.items() if key not in here}
    left = [alias for alias in node.names if alias not in gone]
    if gone and not left and not here and not other and _alone(edits.tree, node):
        return  # an emptied `try` or `if` would no longer ask what it asks
    if gone or here:
        edits.replace_statement(node, lambda: _statement(node, left, here, edits.tree))
    home = dotted(node.module) or "" if isinstance(node, cst.ImportFrom) else ""
    earlier = {key: local for key, local in other.items() if key[0] < home}
    later = {key: local for key, local in other.items() if key not in earlier}
    if earlier:
        edits.before(node, lambda: "\n".join(_import_lines(earlier)))
    if later:
        edits.after(node, lambda: "\n".join(_import_lines(later)))


def _is_gone(
    node: cst.Import | cst.ImportFrom,
    alias: cst.ImportAlias,
    before: set[tuple[int, str]],
    after: set[tuple[int, str]],
    kept: Kept,
) -> bool:
    key = (id(node), bound_name(alias))
    if key in after or key[1] in kept.exported:
        return False
    if key in before:
        return dotted(alias.name) != "torch"  # hardly a training script without it
    old = isinstance(node, cst.ImportFrom) and not node.relative
    unused = old and api.find(f"{dotted(node.module)}.{dotted(alias.name)}") is not None  # type: ignore[union-attr]
    return unused and PurePath(kept.path).name != "__init__.py"


def _alone(tree: Tree, node: cst.CSTNode) -> bool:
    holder = tree.parent(tree.parents[id(node)])
    return not isinstance(holder, cst.Module) and len(tree.block(node)) == 1


def _statement(
    node: cst.Import | cst.ImportFrom, left: list[cst.ImportAlias], here: Wanted, tree: Tree
) -> list[str]:
    texts = [tree.code(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)) for alias in left]
    texts += [name if name == local else f"{name} as {local}" for (_, name), local in here.items()]
    texts = _sorted(texts) if here else texts
    if not texts:
        return []
    if isinstance(node, cst.Import):
        return [f"import {', '.join(texts)}"]
    origin = "." * len(node.relative) + (dotted(node.module) or "")
    return [_from_import(origin, texts, exploded=_one_a_line(node))]


def _one_a_line(node: cst.ImportFrom) -> bool:
    names = node.names
    assert not isinstance(names, cst.ImportStar)
    return len(names) > 1 and all(
        isinstance(alias.comma, cst.Comma)
        and isinstance(alias.comma.whitespace_after, cst.ParenthesizedWhitespace)
        for alias in names[:-1]
    )


def _from_import(origin: str, texts: list[str], *, exploded: bool) -> str:
    line = f"from {origin} import {', '.join(texts)}"
    if len(line) <= _WIDTH and not (exploded and len(texts) > 1):
        return line
    return "\n".join([f"from {origin} import (", *(f"    {text}," for text in texts), ")"])


def _import_lines(wanted: Wanted) -> list[str]:
    lines = []
    for (module, name), local in sorted(wanted.items()):
        if not name:
            lines.append(f"import {module}" if local == module else f"import {module} as {local}")
    modules = sorted({module for module, name in wanted if name})
    for module in modules:
        texts = [
            name if name == local else f"{name} as {local}"
            for (home, name), local in wanted.items()
            if home == module and name
        ]
        lines.append(_from_import(module, _sorted(texts), exploded=False))
    return lines


def _sorted(texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: (text.split(" ")[0][:1].islower(), text.lower()))


def _last_import(module: cst.Module) -> cst.CSTNode | None:
    """The last of the imports that open a file; a docstring or the first statement without."""
    found: cst.CSTNode | None = None
    for statement in module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            small = statement.body[-1]
            if isinstance(small, cst.Import | cst.ImportFrom) or found is None:
                found = small
            continue
        imports = any(isinstance(node, cst.Import | cst.ImportFrom) for node in walk(statement))
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            break
        if imports and isinstance(statement, cst.Try | cst.If):
            found = statement
    return found


def _space_after(last: cst.CSTNode, module: cst.Module, edits: Edits, snippets: bool) -> None:
    """Two blank lines below inserted functions, unless they are there."""
    if not snippets:
        return
    lines = list(module.body)
    keys = [line.body[-1] if isinstance(line, cst.SimpleStatementLine) else line for line in lines]
    position = next(place for place, key in enumerate(keys) if key is last)
    if position + 1 < len(lines):
        following = lines[position + 1]
        blank = sum(1 for line in following.leading_lines if line.comment is None)
        if blank < 2:
            edits.space(keys[position + 1] if keys else last, 2 - blank)


def _names_something(tree: Tree, name: cst.Name) -> bool:
    """Whether a Name node is a label (attribute, keyword, import, definition), not a reference."""
    above = tree.parent(name)
    if isinstance(above, cst.Attribute):
        return above.value is not name or _inside_import(tree, above)
    if isinstance(above, cst.Arg):
        return above.keyword is name
    if isinstance(above, cst.FunctionDef | cst.ClassDef | cst.Param):
        return above.name is name
    return isinstance(above, cst.AsName | cst.ImportAlias | cst.ImportFrom | cst.AssignTarget)


def _inside_import(tree: Tree, node: cst.CSTNode) -> bool:
    above = tree.parent(node)
    while isinstance(above, cst.Attribute):
        above = tree.parent(above)
    return isinstance(above, cst.ImportAlias | cst.ImportFrom)


def _speaks_of_names(tree: Tree, string: cst.SimpleString) -> bool:
    """Whether a string names things: in `__all__`, an annotation, getattr or globals()."""
    for above in tree.ancestors(string):
        if isinstance(above, cst.Annotation):
            return True
        if isinstance(above, cst.Assign | cst.AugAssign | cst.AnnAssign):
            targets = above.targets if isinstance(above, cst.Assign) else [above]
            return any(dotted(target.target) == "__all__" for target in targets)
        if isinstance(above, cst.Call) and dotted(above.func) in ("getattr", "cast", "hasattr"):
            return True
        if isinstance(above, cst.Subscript) and tree.code(above.value) in ("globals()", "locals()"):
            return True
        if isinstance(above, cst.BaseStatement | cst.BaseSmallStatement):
            return False
    return False


def _words(text: str) -> list[str]:
    return "".join(char if char.isidentifier() or char.isdigit() else " " for char in text).split()
