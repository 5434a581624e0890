from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.rules.mixed_precision import fields
from fsdp_migrate.rewrite.tree import walk
from fsdp_migrate.rewrite.undecided import Undecided
from fsdp_migrate.rewrite.units import PolicyReader
from fsdp_migrate.rewrite.values import argument, is_none
from fsdp_migrate.rewrite.wrap import Argument, Translation


def or_default(file: File, value: cst.BaseExpression, default: str, at: cst.CSTNode) -> str:
    """The text of `value` with None, which fully_shard refuses, made the default object."""
    empty = f"{file.fsdp2(default, at)}()"
    if isinstance(value, cst.IfExp):
        body = or_default(file, value.body, default, at)
        orelse = or_default(file, value.orelse, default, at)
        return f"{body} if {file.render(value.test)} else {orelse}"
    if is_none(value):
        return empty
    if isinstance(value, cst.Call) and file.api(value.func):
        return file.render(value)
    leaves = file.values.leaves(value)
    sure = all(isinstance(leaf, cst.Call) and file.api(leaf.func) for leaf in leaves)
    text = file.render(value)
    return text if sure else f"{text} or {empty}"


_BATCH_NORM = "BatchNorm layers, which FSDP1 left in full precision, follow the policy"


class MixedPrecisionArgument(ArgumentRule):
    """
    `mixed_precision=` becomes `mp_policy=`; None, which `fully_shard` refuses, the default object.

    FSDP1 left the inputs of inner units alone (`cast_forward_inputs=False`); FSDP2 casts floating
    inputs of every unit to `param_dtype`. That only matters where a block receives an input of
    another floating dtype, such as a rotary table; `--exact` keeps FSDP1's way.
    """

    name = "mixed-precision-argument"
    arguments = ("mixed_precision",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

                mp = MixedPrecision(param_dtype=bf16)
                model = FSDP(model, mixed_precision=mp if amp else None)
            """,
            after="""
                from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

                mp = MixedPrecisionPolicy(param_dtype=bf16)
                fully_shard(model, mp_policy=mp if amp else MixedPrecisionPolicy())
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file, at = argument.value, into.file, into.at
        if is_none(value):
            return "rewritten", "no mixed precision is the default"
        for leaf in file.values.leaves(value):
            if isinstance(leaf, cst.Call) and str(file.api(leaf.func)) == "MixedPrecision":
                fields(leaf)
        if isinstance(value, cst.Name) and _is_mutated(file, value):
            raise Undecided(f"{value.value} is changed after it is made; FSDP2's policy is frozen")
        casts = BufferCast.of(file, value, at)
        if casts is not None:
            into.after.append(lambda model: casts.text(model, at))

        def policy() -> str:
            return or_default(file, value, "MixedPrecisionPolicy", at)

        if self._keeps_inputs(file, into):
            name = "unit_policy"
            replace = "dataclasses.replace"
            into.setup.append(
                lambda: (
                    f"{file.needs.local(name, at)} = "
                    f"{file.name(replace, at)}({policy()}, cast_forward_inputs=False)"
                )
            )
            into.unit_keywords.append(("mp_policy", lambda: file.needs.local(name, at)))
            into.root_keywords.append(("mp_policy", policy))
            message = "inner units leave their inputs' dtype alone, as FSDP1's did"
            # FSDP1 gave BatchNorm a unit of its own, without mixed precision.
            if "BatchNorm" in file.text:
                return "differs", f"{message}; {_BATCH_NORM}"
            return "rewritten", message
        into.keywords.append(("mp_policy", policy))
        message = "inner units now cast their floating inputs to param_dtype too"
        return "differs", f"{message}; {_BATCH_NORM}"

    @staticmethod
    def _keeps_inputs(file: File, into: Translation) -> bool:
        """Whether inner units must not cast: asked for, or they take more than one input."""
        policy = into.value("auto_wrap_policy")
        if policy is None or not isinstance(into.at, cst.Call) or not file.is_whole(into.at):
            return False
        units = into.units or PolicyReader(file).read(policy)
        if units is None or into.init is not None:
            return False
        return file.options.exact or any(
            file.inputs_of(name.strip()) > 1
            for text in units.classes
            for name in text.strip("()").split(",")
        )


@dataclass(frozen=True, slots=True)
class BufferCast:
    """FSDP1's `buffer_dtype`: floating buffers are cast where the model is sharded."""

    file: File
    dtype: cst.BaseExpression
    test: cst.BaseExpression | None

    @classmethod
    def of(cls, file: File, value: cst.BaseExpression, at: cst.CSTNode) -> BufferCast | None:
        """None where nothing is cast, or where no model of the run can hold such buffers."""
        test = value.test if isinstance(value, cst.IfExp) and is_none(value.orelse) else None
        made = file.values.only(value.body if test is not None and value.body else value)  # type: ignore[attr-defined]
        found = file.api(made.func) if isinstance(made, cst.Call) else None
        if not isinstance(made, cst.Call) or found is None or found.name != "MixedPrecision":
            return None
        given = argument(made, "buffer_dtype", 2)
        if given is None or is_none(given.value) or not file.may_hold_buffers:
            return None
        wraps = isinstance(at, cst.Call) and str(file.api(at.func)) == api.FSDP
        if isinstance(at, cst.Call) and dotted(at.func) != "dict":
            if not wraps or not file.runs_once(at):
                return None  # no statement fits around the call: the report says what differs
        elif not _means_the_same_anywhere(file, given.value):
            return None
        file.casts_buffers.add(id(made))
        return cls(file, given.value, test)

    def text(self, model: str, at: cst.CSTNode) -> str:
        buffer = self.file.needs.local("buffer", at, avoid=model)
        lines = [
            f"for {buffer} in {model}.buffers():",
            f"    if {buffer}.is_floating_point():",
            f"        {buffer}.data = {buffer}.to({self.file.render(self.dtype)})",
        ]
        if self.test is not None:
            lines = [f"if {self.file.render(self.test)}:", *(f"    {line}" for line in lines)]
        return "\n".join(lines)


def _is_mutated(file: File, value: cst.Name) -> bool:
    """Whether a field of the object in a variable is set somewhere."""
    return any(
        isinstance(target.target, cst.Attribute)
        and isinstance(target.target.value, cst.Name)
        and target.target.value.value == value.value
        for target in file.tree.all(cst.AssignTarget)
    )


def _means_the_same_anywhere(file: File, value: cst.BaseExpression) -> bool:
    """Whether an expression names only what the module imports or defines."""
    for node in walk(value):
        if isinstance(node, cst.Name):
            top = file.names.top.bindings.get(node.value)
            if top is not None and file.names.lookup(node.value, node) is not top:
                return False
            inner = isinstance(file.tree.parent(node), cst.Attribute)
            if top is None and not inner:
                return False
    return True
