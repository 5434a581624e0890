"""
The names that rewritten code needs, asked for while rules decide.

What is needed is written down beside the import that the replaced FSDP1 name came from (module
level, inside a function, under a version guard): the new name is needed exactly where the old
one was. imports.py puts them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.names import Binding, Names, Scope, dotted
from fsdp_migrate.rewrite.tree import Tree, walk

_AS_MODULE = {"torch.distributed": "dist"}
_PLAIN = frozenset({"itertools", "functools", "contextlib", "dataclasses", "copy", "torch"})
Wanted = dict[tuple[str, str], str]  # (module, name or "") -> local name


@dataclass
class Needs:
    """New names asked for, by the import statement they belong beside (None: top of the file)."""

    tree: Tree
    names: Names
    wanted: dict[int | None, Wanted] = field(default_factory=dict)
    snippets: dict[str, str] = field(default_factory=dict)  # helper functions, by name
    nearby: dict[int, cst.CSTNode] = field(default_factory=dict)

    def name(self, qualified: str, at: cst.CSTNode) -> str:
        """The text that means `qualified` in the code at `at`, imported there if need be."""
        existing = self._existing(qualified, at)
        if existing is not None:
            return existing
        anchor = self._anchor(at)
        top = None if at is self.tree.module and self._is_guarded(anchor) else anchor
        root = qualified.split(".")[0]
        module, _, name = qualified.rpartition(".")
        if module in _AS_MODULE:
            local = self._free(_AS_MODULE[module], module, at)
            self.wanted.setdefault(top, {})[(module, "")] = local
            return f"{local}.{name}"
        if root in _PLAIN and not qualified.startswith("torch.distributed"):
            self.wanted.setdefault(top, {})[(root, "")] = root
            return qualified
        local = self._free(name, qualified, at)
        self.wanted.setdefault(anchor, {})[(module, name)] = local
        return local

    def local(self, name: str, at: cst.CSTNode, avoid: str = "") -> str:
        """A name for a new variable at `at`: `name`, unless that already means something there."""
        scope = self.names.scope(at)
        while isinstance(scope.node, cst.ClassDef) and scope.parent is not None:
            scope = scope.parent
        while name in scope.bindings or avoid.split(".")[0] == name:
            name = f"fsdp_{name}" if not name.startswith("fsdp_") else f"{name}_"
        return name

    def snippet(self, name: str, text: str) -> str:
        """The name of a helper function that the file will hold after its imports."""
        if self.snippets.get(name, text) == text and name not in self.names.top.bindings:
            self.snippets[name] = text
            return name
        return self.snippet(f"{name}_", text.replace(f"def {name}(", f"def {name}_("))

    def _existing(self, qualified: str, at: cst.CSTNode) -> str | None:
        module, _, name = qualified.rpartition(".")
        prefixes = {qualified: "", module: f".{name}"}
        if not module.startswith("torch.distributed"):
            prefixes[qualified.split(".")[0]] = qualified[len(qualified.split(".")[0]) :]
        for local, bindings in self._visible(at):
            origins = {binding.qualified for binding in bindings}
            if len(origins) == 1 and (origin := origins.pop()) in prefixes:
                return local + prefixes[origin]
        return self._spelled_out(module, name, at)

    def _spelled_out(self, module: str, name: str, at: cst.CSTNode) -> str | None:
        """`torch.distributed.fsdp.X` where the code itself writes the whole path."""
        if module != api.HOME or at is self.tree.module:
            return None
        for node in walk(at):
            if isinstance(node, cst.Attribute) and self.names.qualified(node.value) == api.HOME:
                return f"{dotted(node.value)}.{name}"
        return None

    def _visible(self, at: cst.CSTNode) -> Iterator[tuple[str, list[Binding]]]:
        seen: set[str] = set()
        for scope in self._scopes(at):
            for local, bindings in scope.bindings.items():
                if local not in seen:
                    seen.add(local)
                    yield local, bindings

    def _scopes(self, at: cst.CSTNode) -> Iterator[Scope]:
        scope: Scope | None = self.names.scope(at)
        while scope is not None:
            yield scope
            scope = scope.parent

    def _anchor(self, at: cst.CSTNode) -> int | None:
        """The import of FSDP1 that the code at `at` depends on; the innermost one around it."""
        for node in walk(at) if at is not self.tree.module else ():
            if isinstance(node, cst.Name):
                for binding in self.names.lookup(node.value, node):
                    if binding.qualified and is_fsdp(binding.qualified):
                        return self._remember(binding.node)
        for scope in self._scopes(at):
            for bindings in scope.bindings.values():
                for binding in bindings:
                    if binding.qualified and is_fsdp(binding.qualified):
                        return self._remember(binding.node)
        return None

    def _is_guarded(self, anchor: int | None) -> bool:
        """Whether an import stands under an `if` or `try`: only FSDP's own names belong there."""
        line = self.tree.parents[id(self.nearby[anchor])] if anchor is not None else None
        return line is not None and not isinstance(self.tree.parent(line), cst.Module)

    def _remember(self, node: cst.CSTNode) -> int:
        self.nearby[id(node)] = node
        return id(node)

    def _free(self, name: str, qualified: str, at: cst.CSTNode) -> str:
        taken = self.names.lookup(name, at)
        free = all(binding.qualified == qualified for binding in taken)
        return name if free else f"fsdp2_{name}"


def is_fsdp(qualified: str) -> bool:
    return qualified == api.HOME or qualified.startswith(f"{api.HOME}.")
