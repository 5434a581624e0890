"""
Which kind of state dict FSDP1 would give at a place in the code.

FSDP1 kept the kind as state on the model: set for a `with` block, or until further notice, FULL
when never set. FSDP2 has no such state; each call says what it wants. So the kind in force has
to be found for every call: the innermost block around it, then the last `set_state_dict_type`
before it in its function, then the only one of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.values import argument, is_none, truth

STATE_DICT_HOME = "torch.distributed.checkpoint.state_dict"
_PARAMETERS = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of a state dict config; `offload` and `rank0` are None when the run decides."""

    offload: bool | None = False
    rank0: bool | None = False
    offload_value: cst.BaseExpression | None = None
    rank0_value: cst.BaseExpression | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """`kind` is FULL, SHARDED or LOCAL; `call` the call that set it, None for the default."""

    kind: str
    model: Config
    optim: Config
    call: cst.Call | None = None


DEFAULT = Mode("FULL", Config(), Config(offload=True))


class Modes:
    """Raises Undecided from `at` where the mode cannot be known."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.left: set[int] = set()  # contexts that stay as they are
        self.local_is_sharded = False

    @cached_property
    def sticky(self) -> list[cst.Call]:
        uses = [use for use in self.file.all_uses if use.api.name == api.FSDP]
        return [use.call for use in uses if use.api.member == "set_state_dict_type" and use.call]

    def at(self, node: cst.CSTNode) -> Mode:
        for above in self.file.tree.ancestors(node):
            if isinstance(above, cst.With) and (call := self.entered(above)) is not None:
                if id(call) in self.left:
                    raise Undecided("the state_dict_type context around it is left as it is")
                return self.read(call)
            if isinstance(above, cst.With) and self._loose and self._enters_unknown(above):
                raise Undecided("the context entered around it may set the kind")
            if isinstance(above, cst.FunctionDef):
                break
        function = self.file.tree.function(node)
        if any(self.file.tree.function(loose) is function for loose in self._loose):
            raise Undecided("the context that this function makes may set the kind")
        call = self._set_before(node)
        return self.read(call) if call is not None else self._of_run()

    def _of_run(self) -> Mode:
        """The mode that some other file of the run sets for good."""
        modes = self.file.project.sticky_modes()
        if not modes:
            return DEFAULT
        if len(modes) > 1 or not isinstance(modes[0], Mode) or modes[0].kind == "UNKNOWN":
            raise Undecided("several set_state_dict_type calls in the run: which one is in force?")
        return modes[0]

    @cached_property
    def _loose(self) -> list[cst.CSTNode]:
        """The state_dict_type contexts that are made apart from the `with` that enters them."""
        found: list[cst.CSTNode] = []
        for use in self.file.all_uses:
            if use.api == api.Api(api.FSDP, "state_dict_type"):
                above = self.file.tree.parent(use.call) if use.call is not None else None
                if isinstance(above, cst.IfExp):
                    above = self.file.tree.parent(above)
                if not isinstance(above, cst.WithItem):
                    found.append(use.node)
        return found

    def _enters_unknown(self, block: cst.With) -> bool:
        """Whether a `with` enters something this file made or was given."""
        for item in block.items:
            value = item.item.func if isinstance(item.item, cst.Call) else item.item
            if self.file.qualified(value) is None and dotted(value) != "open":
                return True
        return False

    def entered(self, block: cst.With) -> cst.Call | None:
        """The state_dict_type call that a `with` enters, be it under a condition."""
        for item in block.items:
            value = item.item
            sides = (value.body, value.orelse) if isinstance(value, cst.IfExp) else (value,)
            for side in sides:
                if isinstance(side, cst.Call) and self._is_context(side):
                    return side
        return None

    def _is_context(self, call: cst.Call) -> bool:
        found = self.file.api(call.func)
        return found is not None and (found.name, found.member) == (api.FSDP, "state_dict_type")

    def _set_before(self, node: cst.CSTNode) -> cst.Call | None:
        tree = self.file.tree
        function = tree.function(node)
        here = [call for call in self.sticky if tree.function(call) is function]
        before = [call for call in here if tree.before(call, node)]
        if before:
            return before[-1]
        if not self.sticky:
            return None
        if len({tree.code(call).split("(", 1)[1] for call in self.sticky}) == 1:
            return self.sticky[0]
        raise Undecided("several set_state_dict_type calls: which one is in force here?")

    def read(self, call: cst.Call) -> Mode:
        """The mode that a state_dict_type or set_state_dict_type call sets."""
        given = arguments(cst.Call(call.func, self._spread(call)), _PARAMETERS)
        kind = self.kind(given.get("state_dict_type"))
        optim = self.config(given.get("optim_state_dict_config"), Config(offload=True))
        return Mode(kind, self.config(given.get("state_dict_config"), Config()), optim, call)

    def _spread(self, call: cst.Call) -> list[cst.Arg]:
        """The arguments of a call, with starred literals in variables taken apart."""
        spread: list[cst.Arg] = []
        for arg in call.args:
            made = self.file.values.only(arg.value) if arg.star else arg.value
            if arg.star == "*" and isinstance(made, cst.Tuple | cst.List):
                spread += [cst.Arg(element.value) for element in made.elements]
            elif arg.star == "**" and isinstance(made, cst.Call) and dotted(made.func) == "dict":
                spread += made.args
            else:
                spread.append(arg)
        return spread

    def kind(self, value: cst.BaseExpression | None) -> str:
        """FULL, SHARDED or LOCAL, of a StateDictType expression."""
        if value is None:
            raise Undecided("which StateDictType is set cannot be seen")
        found = self.file.api(self.file.values.only(value))
        if found is None or found.name != "StateDictType" or found.member is None:
            raise Undecided(f"which StateDictType {self.file.tree.code(value)} is cannot be seen")
        if found.member.startswith("LOCAL") and not self.local_is_sharded:
            raise Undecided("FSDP2 has no local state dict; --unsafe makes it a sharded one")
        return found.member.removesuffix("_STATE_DICT")

    def _of_other_file(self, value: cst.BaseExpression) -> Config | None:
        qualified = self.file.names.qualified(value)
        found = self.file.project.config(qualified, self.file.path) if qualified else None
        return found if isinstance(found, Config) else None

    def config(self, value: cst.BaseExpression | None, default: Config) -> Config:
        if value is None or is_none(value):
            return default
        made = self.file.values.only(value)
        shared = self._of_other_file(made)
        if shared is not None:
            return shared
        found = self.file.api(made.func) if isinstance(made, cst.Call) else None
        if not isinstance(made, cst.Call) or found is None or "Config" not in found.name:
            raise Undecided(f"where {self.file.tree.code(value)} is made cannot be seen here")
        if any(arg.star for arg in made.args):
            raise Undecided("which fields a starred argument sets cannot be seen here")
        is_full = found.name.startswith("Full")
        offload = argument(made, "offload_to_cpu", 0)
        rank0 = argument(made, "rank0_only", 1) if is_full else None
        return Config(
            offload="Optim" in found.name if offload is None else truth(offload.value),
            rank0=False if rank0 is None else truth(rank0.value),
            offload_value=offload.value if offload else None,
            rank0_value=rank0.value if rank0 else None,
        )


def arguments(call: cst.Call, parameters: tuple[str, ...]) -> dict[str, cst.BaseExpression]:
    """A call's arguments by parameter name."""
    given: dict[str, cst.BaseExpression] = {}
    for position, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and position >= len(parameters)):
            raise Undecided("starred or surplus arguments cannot be matched to parameters")
        given[arg.keyword.value if arg.keyword else parameters[position]] = arg.value
    return given


def model_of(call: cst.Call) -> cst.BaseExpression | None:
    """The model that a state_dict_type call is about."""
    found = argument(call, "module", 0) or argument(call, "model")
    return found.value if found else None


def state_dict_calls(file: File, block: cst.CSTNode) -> Iterator[cst.Call]:
    """The calls of `state_dict` and `load_state_dict` on FSDP models, in `block`."""
    for node in walk(block):
        if is_state_dict_call(file, node):
            yield node  # type: ignore[misc]


def is_state_dict_call(file: File, node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value in ("state_dict", "load_state_dict")
        and not (dotted(node.func) and file.api(node.func))
        and file.models.is_model(node.func.value)
    )


def options(file: File, at: cst.CSTNode, **fields: str) -> str:
    """`options=StateDictOptions(...)`, or nothing when there is nothing to say."""
    if not fields:
        return ""
    name = file.name(f"{STATE_DICT_HOME}.StateDictOptions", at)
    return f"options={name}({', '.join(f'{key}={value}' for key, value in fields.items())})"


def full_options(
    file: File, kind: str, config: Config, *, whole_value: bool
) -> tuple[dict[str, str], str | None, str]:
    """
    How StateDictOptions says what a config said: its fields; for dicts that must be on every
    rank's CPU, the test under which values are copied there; and what differs, or "".

    FSDP2 offloads a full dict on rank 0 alone (`cpu_offload=True`); other ranks get {}.
    """
    if kind != "FULL":
        fields = {"cpu_offload": _text(file, config.offload, config.offload_value)}
        return ({} if config.offload is False or not whole_value else fields), None, ""
    whole = {"full_state_dict": "True"}
    offload = _text(file, config.offload, config.offload_value)
    if config.rank0 is None and offload != _text(file, config.rank0, config.rank0_value):
        raise Undecided("rank0_only must be a literal, or the same as offload_to_cpu")
    if config.rank0 is not False:
        if offload == "False":
            return whole, None, "every rank holds the full dict, not rank 0 alone"
        return whole | {"cpu_offload": offload}, None, ""
    if offload == "False":
        return whole, None, ""
    return whole, offload, "whole on the device first, then copied to the CPU"


def _text(file: File, known: bool | None, value: cst.BaseExpression | None) -> str:
    if known is not None or value is None:
        return str(known)
    return file.render(value)
