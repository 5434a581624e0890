"""One file as the rules see it: its FSDP1 uses, the edits asked for, what each use came to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import libcst as cst

from fsdp_migrate.rewrite import api, hints
from fsdp_migrate.rewrite.api import Api
from fsdp_migrate.rewrite.edits import Edits, Piece
from fsdp_migrate.rewrite.imports import Needs
from fsdp_migrate.rewrite.models import Models
from fsdp_migrate.rewrite.names import Names, dotted
from fsdp_migrate.rewrite.options import Options, State
from fsdp_migrate.rewrite.project import Project
from fsdp_migrate.rewrite.report import Site
from fsdp_migrate.rewrite.skips import Skips, marker
from fsdp_migrate.rewrite.tree import SCOPES, Tree, walk
from fsdp_migrate.rewrite.values import Values

if TYPE_CHECKING:
    from fsdp_migrate.rewrite.state_dict_modes import Modes

_WIDTH = 88


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A name or attribute chain that means something of FSDP1; `call` when it is called."""

    node: cst.CSTNode
    api: Api
    call: cst.Call | None


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A model that is sharded where FSDP wrapped it, and the texts that name it from there on."""

    statement: cst.CSTNode
    call: cst.Call
    names: tuple[str, ...]
    translation: Any
    placeable: bool  # whether statements can follow the sharding
    writer: Any


@dataclass(frozen=True, slots=True)
class Parsed:
    """A file as far as it does not depend on the others."""

    path: str
    text: str
    tree: Tree
    names: Names


class File:
    def __init__(self, parsed: Parsed, options: Options, project: Project) -> None:
        self.path = parsed.path
        self.options = options
        self.project = project
        self.tree = parsed.tree
        self.names = parsed.names
        self.text = parsed.text
        self.edits = Edits(self.tree)
        self.needs = Needs(self.tree, self.names)
        self.values = Values(self.tree, self.names)
        self.skips = Skips(parsed.text)
        self.rule = ""
        self.argument_rules: tuple[Any, ...] = ()
        self.wraps: list[Wrapped] = []
        self.keyword_dicts: dict[int, Any] = {}
        self.casts_buffers: set[int] = set()
        self.left: list[cst.Call] = []  # FSDP calls that stay as they are
        self.spoilt: set[int] = set()  # keyword dicts that a call which is left uses too
        self.computing: dict[str, bool] = {}  # whether a method of this name computes
        self._devices: list[tuple[cst.CSTNode, str]] = []  # blocks with a set_device, and of what
        self.factories = 0  # calls that make or take FSDP as a function, rewritten
        self.strategy_by_name = False
        self.dual = False
        self.registered: dict[int, list[str]] = {}  # methods, by the wrap they belong to
        self.sets_device = "torch.cuda.set_device(" in parsed.text
        self._sites: dict[int, Site] = {}
        self._quiet: set[int] = set()
        self._unwrapped: dict[int, list[cst.WithItem]] = {}

    @cached_property
    def models(self) -> Models:
        return Models(self)

    @cached_property
    def modes(self) -> Modes:
        from fsdp_migrate.rewrite.state_dict_modes import Modes

        return Modes(self)

    # --- trying ----------------------------------------------------------------------------

    def copy_state(self) -> tuple[Any, ...]:
        """All decisions so far; a rule that finds it cannot decide goes back to them."""
        own = (dict(self._sites), set(self._quiet), dict(self._unwrapped), list(self.wraps))
        kept = (list(self._devices), self.strategy_by_name)
        dicts = (dict(self.keyword_dicts), set(self.casts_buffers), kept)
        return self.edits.copy_state(), dict(self.values.consumed), own, dicts

    def restore(self, state: tuple[Any, ...]) -> None:
        edits, consumed, own, dicts = state
        self.edits.restore(edits)
        self.values.consumed = dict(consumed)
        self._sites, self._quiet, self._unwrapped, self.wraps = map(copy, own)
        keyword_dicts, casts, (devices, self.strategy_by_name) = dicts
        self._devices = list(devices)
        self.keyword_dicts, self.casts_buffers = dict(keyword_dicts), set(casts)

    # --- what is there -------------------------------------------------------------------

    @cached_property
    def all_uses(self) -> list[Use]:
        return list(self._find_uses())

    @cached_property
    def has_fsdp(self) -> bool:
        """Whether this file knows FSDP1's wrapper by name."""
        found = map(api.find, self.names.imported())
        return any(one is not None and one.name == api.FSDP for one in found) or any(
            use.api.name == api.FSDP for use in self.all_uses
        )

    @property
    def is_fsdp1(self) -> bool:
        """Whether anything of FSDP1 itself is used here, or elsewhere in the run."""
        found = map(api.find, self.names.imported())
        own = any(one is not None and one.name in api.CLASSES for one in found)
        return own or bool(self.all_uses) or self.project.has_fsdp

    @cached_property
    def may_hold_buffers(self) -> bool:
        """Whether a model of the run can hold floating buffers, as far as its text shows."""
        homes = hints.model_homes(self.text) | self.project.model_homes
        foreign = any(not self.project.holds(home) for home in homes)
        return hints.holds_buffers(self.text) or self.project.holds_buffers or foreign

    def inputs_of(self, block: str) -> int:
        """How many inputs the forward of a class of the run takes; 0 when it is not in sight."""
        return hints.forward_inputs(self.text).get(block) or self.project.inputs_of(block)

    def is_whole(self, call: cst.Call) -> bool:
        """Whether a call is all that its plain statement does."""
        statement = self.tree.statement(call)
        kinds = cst.Assign | cst.AnnAssign | cst.Return | cst.Expr
        return isinstance(statement, kinds) and statement.value is call

    def device_is_set(self, at: cst.CSTNode, device: str) -> bool:
        """Whether a set_device that was put above already runs before `at` does."""
        block = self.tree.parent(self.tree.statement(at))
        if isinstance(block, cst.SimpleStatementLine):
            block = self.tree.parent(block)
        known = [holder for holder, text in self._devices if text == device]
        if block is None or any(self.tree.inside(at, holder) for holder in known):
            return True
        self._devices.append((block, device))
        return False

    def runs_once(self, call: cst.Call) -> bool:
        """Whether a call runs exactly once when its plain statement does: statements fit around."""
        statement = self.tree.statement(call)
        if not isinstance(statement, cst.BaseSmallStatement):
            return False
        for above in self.tree.ancestors(call):
            if above is statement:
                return True
            if isinstance(above, (*SCOPES, cst.IfExp, cst.BooleanOperation)):
                return False
        return True

    def uses(self, name: str, member: str | None = None) -> Iterator[Use]:
        """The uses of one FSDP1 name that no earlier rule has dealt with."""
        for use in self.all_uses:
            if use.api.name == name and use.api.member == member and self.open(use.node):
                yield use

    def api(self, node: cst.CSTNode | None) -> Api | None:
        """The FSDP1 name that `node` is."""
        qualified = self.qualified(node)
        return api.find(qualified) if qualified else None

    def qualified(self, node: cst.CSTNode | None) -> str | None:
        """The dotted origin of a name, seen through re-exports by other files of the run."""
        if node is None or dotted(node) is None:
            return None
        qualified = self.names.qualified(node)
        return self.project.origin(qualified, self.path) if qualified else None

    def is_call(self, node: cst.CSTNode | None, *qualified: str) -> bool:
        return isinstance(node, cst.Call) and self.qualified(node.func) in qualified

    def _find_uses(self) -> Iterator[Use]:
        heads = self._heads()
        for node in self.tree.all(cst.Name):
            if node.value not in heads or not self._is_reference(node):
                continue
            if node.value == "torch" and not self._is_distributed(node):
                continue
            best: tuple[cst.CSTNode, Api] | None = None
            current: cst.CSTNode = node
            while True:
                if (found := self.api(current)) is not None:
                    best = (current, found)
                above = self.tree.parent(current)
                if not isinstance(above, cst.Attribute) or above.value is not current:
                    break
                current = above
            if best is not None:
                above = self.tree.parent(best[0])
                called = isinstance(above, cst.Call) and above.func is best[0]
                yield Use(best[0], best[1], above if called else None)  # type: ignore[arg-type]

    def _heads(self) -> set[str]:
        """The names in this file that may lead to something of FSDP1."""
        heads = {
            name
            for name, origin in self.names.import_bindings()
            if origin.split(".")[0] == "torch" or self.project.holds(origin.split(".")[0])
        }
        return heads | (api.CLASSES | api.POLICIES if self.names.top.stars else set())

    def _is_distributed(self, node: cst.Name) -> bool:
        """Whether `torch` is followed by `.distributed`."""
        above = self.tree.parent(node)
        return isinstance(above, cst.Attribute) and above.attr.value == "distributed"

    def _is_reference(self, name: cst.Name) -> bool:
        above = self.tree.parent(name)
        if isinstance(above, cst.Attribute):
            return above.value is name and not self._in_import(above)
        if isinstance(above, cst.Arg):
            return above.keyword is not name
        if isinstance(above, cst.FunctionDef | cst.ClassDef):
            return above.name is not name
        return not isinstance(above, cst.Param | cst.AssignTarget | cst.AsName) and (
            not self._in_import(name)
        )

    def _in_import(self, node: cst.CSTNode) -> bool:
        return self.tree.nearest(node, (cst.Import, cst.ImportFrom)) is not None

    # --- what becomes of it --------------------------------------------------------------

    def open(self, node: cst.CSTNode) -> bool:
        """Whether the running rule may decide over `node`; a skipped one is accounted for."""
        if id(node) in self._sites or id(node) in self._quiet:
            return False
        statement = self.tree.statement(node)
        first = self.tree.line(statement)
        compound = isinstance(statement, cst.BaseCompoundStatement)
        last = self.tree.line(node) if compound else self.tree.last_line(statement)
        if self.skips.covers(first, last, self.rule):
            self.skipped(node, "the user's comment asks to skip it")
            return False
        return True

    def rewritten(self, node: cst.CSTNode, what: Api | str, message: str) -> None:
        self._account(node, what, "rewritten", message)

    def differs(self, node: cst.CSTNode, what: Api | str, message: str) -> None:
        self._account(node, what, "differs", message)

    def skipped(self, node: cst.CSTNode, message: str, what: Api | str | None = None) -> None:
        self._account(node, what or self._name(node), "skipped", message)

    def todo(self, node: cst.CSTNode, what: Api | str, message: str) -> None:
        """Leave `node` as it is, with a marker above its statement."""
        self._account(node, what, "todo", message)
        self.edits.mark(self.tree.statement(node), marker(self.rule, message))

    def skip_all(self, why: str) -> None:
        """Every use that is still open is left."""
        running = self.rule
        for use in self.all_uses:
            if not self.accounted(use.node):
                self.rule = api.rule_of(use.api)
                self.skipped(use.node, why, use.api)
        self.rule = running

    def covered(self, node: cst.CSTNode) -> None:
        """`node` is part of a use that is accounted for as a whole."""
        self._quiet.add(id(node))

    def cover_below(self, node: cst.CSTNode) -> None:
        """All FSDP1 names below `node` are part of a use that is accounted for."""
        for inner in walk(node):
            if id(inner) not in self._sites:
                self._quiet.add(id(inner))

    def keep_values(self, call: cst.Call, used: Collection[int] = ()) -> None:
        """What a call which stays is given stays FSDP1's too, unless a rewritten call uses it."""
        for leaf in self.leaves_of(call):
            if id(leaf) not in used:
                self.cover_below(leaf)

    def leaves_of(self, call: cst.Call) -> list[cst.BaseExpression]:
        """The expressions that a call's arguments come from."""
        return [leaf for arg in call.args for leaf in self.values.leaves(arg.value)]

    def unwrap(self, block: cst.With, item: cst.WithItem) -> None:
        """Take `item` out of a `with`; a block that has no other is replaced by its body."""
        gone = self._unwrapped.setdefault(id(block), [])
        gone.append(item)
        if len(gone) == 1:
            self.edits.replace_statement(block, lambda: self._without(block, gone))

    def _without(self, block: cst.With, gone: list[cst.WithItem]) -> Sequence[Piece]:
        rest = [item for item in block.items if item not in gone]
        if not rest:
            return self.edits.pieces(block.body)
        items = [
            item.with_changes(item=self.edits.rendered(item.item), comma=cst.MaybeSentinel.DEFAULT)
            for item in rest
        ]
        body = self.edits.rendered(block.body)
        return [block.with_changes(items=items, body=body, leading_lines=())]

    def accounted(self, node: cst.CSTNode) -> bool:
        return id(node) in self._sites or id(node) in self._quiet

    def _name(self, node: cst.CSTNode) -> str:
        return str(self.api(node) or self.tree.code(node).split("\n")[0])

    def _account(self, node: cst.CSTNode, what: Api | str, state: State, message: str) -> None:
        line = self.tree.line(node)
        self._sites[id(node)] = Site(self.path, line, str(what), state, self.rule, message)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(sorted(self._sites.values(), key=lambda site: site.line))

    # --- names in what is written --------------------------------------------------------

    def name(self, qualified: str, at: cst.CSTNode) -> str:
        """How the code at `at` can call something, importing it there if it must."""
        return self.needs.name(qualified, at)

    def fsdp2(self, name: str, at: cst.CSTNode) -> str:
        return self.needs.name(f"{api.fsdp2_home(name, self.options.target_torch)}.{name}", at)

    def render(self, node: cst.CSTNode) -> str:
        return self.edits.render(node)

    def call(self, function: str, arguments: Sequence[str], at: cst.CSTNode) -> str:
        """A call's text, one argument a line where one line would be too long."""
        texts = [text for text in arguments if text]
        if isinstance(at, cst.Call) and _one_a_line(at) and len(texts) > 1:
            return _exploded(function, texts)
        return call_text(function, texts, self.indentation(at))

    def indentation(self, at: cst.CSTNode) -> int:
        blocks = (cst.IndentedBlock, cst.SimpleStatementSuite)
        return 4 * sum(isinstance(above, blocks) for above in self.tree.ancestors(at))


def call_text(function: str, arguments: Sequence[str], indentation: int) -> str:
    line = f"{function}({', '.join(arguments)})"
    if indentation + len(line) <= _WIDTH and "\n" not in line:
        return line
    together = ", ".join(arguments)
    if indentation + 4 + len(together) <= _WIDTH and "\n" not in together:
        return f"{function}(\n    {together}\n)"
    return _exploded(function, arguments)


def _exploded(function: str, arguments: Sequence[str]) -> str:
    inner = [line for text in arguments for line in shifted(f"{text},", 1)]
    return "\n".join([f"{function}(", *inner, ")"])


def _one_a_line(call: cst.Call) -> bool:
    return len(call.args) > 1 and all(
        isinstance(arg.comma, cst.Comma)
        and isinstance(arg.comma.whitespace_after, cst.ParenthesizedWhitespace)
        for arg in call.args[:-1]
    )


def shifted(text: str, levels: int) -> list[str]:
    """The lines of `text`, indented; strings that span lines stay as they are."""
    lines = text.split("\n")
    if '"""' in text or "'''" in text:
        return ["    " * levels + lines[0], *lines[1:]]
    return ["    " * levels + line if line else line for line in lines]
