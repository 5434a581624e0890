"""
Which expressions are FSDP models.

A variable is one if some assignment gives it one, if it is handed to an FSDP class method, if
its annotation says so, or if it is a parameter that some call of the run passes one to. What no
evidence speaks for is not: `state_dict()` of an unknown object is nobody's business here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.names import Binding, dotted
from fsdp_migrate.rewrite.tree import walk

if TYPE_CHECKING:
    from fsdp_migrate.rewrite.file import File

_SAME = frozenset({"to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double"})
_MODEL_FIRST = frozenset(
    {
        "state_dict_type",
        "set_state_dict_type",
        "get_state_dict_type",
        "optim_state_dict",
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "summon_full_params",
        "fsdp_modules",
    }
)
_THROUGH = frozenset({"torch.compile", "torch._dynamo.optimize"})
_DDP = frozenset(
    {
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    }
)


class Models:
    def __init__(self, file: File) -> None:
        self.file = file
        self._calls: dict[str, list[cst.Call]] | None = None
        self._busy: set[int] = set()
        self._known: dict[int, bool] = {}
        self._told: set[int] = set()  # bindings that evidence speaks for
        self._told_attributes: set[str] = set()
        for use in file.all_uses:
            if use.api.name == api.FSDP and use.api.member and use.call and use.call.args:
                self._tell(use.call)

    def is_model(self, node: cst.BaseExpression) -> bool:
        """Whether `node` is, or may be, an FSDP-wrapped module."""
        if id(node) not in self._known:
            if id(node) in self._busy or ruled_out(self.file, node):
                return False
            self._busy.add(id(node))
            answer = self._judge(node)
            self._busy.discard(id(node))
            self._known[id(node)] = answer
        return self._known[id(node)]

    def may_be_ddp(self, node: cst.BaseExpression) -> bool:
        """Whether some assignment makes it a DistributedDataParallel as well."""
        return any(
            isinstance(leaf, cst.Call) and self.file.qualified(leaf.func) in _DDP
            for leaf in self.file.values.leaves(node)
        )

    def _tell(self, call: cst.Call) -> None:
        """An FSDP class method names its model first, or as `model=` or `module=`."""
        found = self.file.api(call.func)
        first = found is not None and found.member in _MODEL_FIRST
        for position, arg in enumerate(call.args):
            named = arg.keyword is not None and arg.keyword.value in ("model", "module")
            if not named and (not first or position or arg.keyword is not None):
                continue
            if isinstance(arg.value, cst.Name) and self.file.values.bindings(arg.value):
                self._told.update(id(one) for one in self.file.values.reaching(arg.value))
            elif text := dotted(arg.value):
                self._told_attributes.add(text)

    def _judge(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.IfExp):
            return self.is_model(node.body) or self.is_model(node.orelse)
        if isinstance(node, cst.Call):
            return self._call(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        if isinstance(node, cst.Name):
            if node.value in self._told_attributes:  # a name this file never binds
                return True
            return any(self._binding(one) for one in self.file.values.reaching(node))
        return False

    def _call(self, node: cst.Call) -> bool:
        found = self.file.api(node.func)
        if found is not None and found.name == api.FSDP and found.member is None:
            return True
        if self.file.qualified(node.func) in _THROUGH and node.args:
            return self.is_model(node.args[0].value)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in _SAME:
            return self.is_model(node.func.value)
        return self._returned(node, None)

    def _attribute(self, node: cst.Attribute) -> bool:
        text = dotted(node)
        if text is None:
            return False
        if text in self._told_attributes:
            return True
        found = self.file.names.attribute(text, node)
        if found:
            return any(self._binding(one) for one in found)
        # `trainer.model` where some class of this file sets `self.model` to an FSDP model
        return node.attr.value in self._class_attributes or self.file.project.holds_model(
            node.attr.value
        )

    @property
    def _class_attributes(self) -> frozenset[str]:
        return frozenset(
            name.removeprefix("self.") for name in self._told_attributes if name.count(".") == 1
        )

    def _binding(self, binding: Binding) -> bool:
        if id(binding) in self._told:
            return True
        if isinstance(binding.definition, cst.Param):
            return self._parameter(binding.definition)
        if binding.value is None:
            return self._looped(binding.node)
        if binding.index is not None:
            return isinstance(binding.value, cst.Call) and self._returned(
                binding.value, binding.index
            )
        return self.is_model(binding.value)

    def _looped(self, node: cst.CSTNode) -> bool:
        """`for module in FSDP.fsdp_modules(...)`."""
        if not isinstance(node, cst.For | cst.CompFor) or not isinstance(node.iter, cst.Call):
            return False
        found = self.file.api(node.iter.func)
        return found is not None and found.member == "fsdp_modules"

    def _parameter(self, param: cst.Param) -> bool:
        annotation = param.annotation
        if annotation is not None:
            for inner in walk(annotation.annotation):
                found = self.file.api(inner) if dotted(inner) else None
                if found is not None and found.name == api.FSDP:
                    return True
        function = self.file.tree.nearest(param, cst.FunctionDef)
        if function is None:
            return False
        if any(self.is_model(value) for value in self.passed(function, param)):
            return True
        called, position = self._called_as(function, param)
        return self.file.project.takes_model(called, position, param.name.value)

    def passed(self, function: cst.FunctionDef, param: cst.Param) -> list[cst.BaseExpression]:
        """What the calls of `function` in this file pass for `param`."""
        called, position = self._called_as(function, param)
        name = param.name.value
        values = []
        for call in self._calls_of(called):
            for place, arg in enumerate(call.args):
                by_name = arg.keyword is not None and arg.keyword.value == name
                if by_name or (arg.keyword is None and not arg.star and place == position):
                    values.append(arg.value)
        return values

    def _called_as(self, function: cst.FunctionDef, param: cst.Param) -> tuple[str, int | None]:
        """The name `function` is called by, and the position of `param` in such a call."""
        names = [one.name.value for one in function.params.params]
        holder = self.file.tree.nearest(function, (cst.ClassDef, cst.FunctionDef))
        name = param.name.value
        method = isinstance(holder, cst.ClassDef)
        position = names.index(name) - int(method) if name in names else None
        called = function.name.value
        if called == "__init__" and isinstance(holder, cst.ClassDef):
            called = holder.name.value
        return called, position

    def _calls_of(self, name: str) -> list[cst.Call]:
        if self._calls is None:
            self._calls = {}
            for call in self.file.tree.all(cst.Call):
                text = dotted(call.func)
                if text:
                    self._calls.setdefault(text.split(".")[-1], []).append(call)
        return self._calls.get(name, [])

    def _returned(self, call: cst.Call, index: int | None) -> bool:
        """Whether a function of this file returns a model (as element `index`)."""
        text = dotted(call.func)
        if text is None:
            return False
        name = text.split(".")[-1]
        for function in self.file.tree.all(cst.FunctionDef):
            if function.name.value == name and self._function_returns(function, index):
                return True
        return self.file.project.returns_model(name, index)

    def _function_returns(self, function: cst.FunctionDef, index: int | None) -> bool:
        for node in walk(function):
            if not isinstance(node, cst.Return) or node.value is None:
                continue
            if self.file.tree.function(node) is not function:
                continue
            value = node.value
            if index is not None:
                if not isinstance(value, cst.Tuple) or index >= len(value.elements):
                    continue
                value = value.elements[index].value
            if self.is_model(value):
                return True
        return False


def ruled_out(file: File, node: cst.BaseExpression) -> bool:
    """Whether the code around says that `node` is not an FSDP model: `if not isinstance(...)`."""
    text = dotted(node)
    if text is None:
        return False
    below: cst.CSTNode = node
    for above in file.tree.ancestors(node):
        if isinstance(above, cst.If | cst.IfExp) and below is not above.test:
            answer = _asks(file, above.test, text)
            if answer is not None and answer is not (below is above.body):
                return True
        if isinstance(above, cst.IndentedBlock | cst.Module):
            for earlier in above.body:
                if earlier is below:
                    break
                if (
                    isinstance(earlier, cst.If)
                    and _asks(file, earlier.test, text) is True
                    and earlier.orelse is None
                    and _leaves_block(earlier.body)
                ):
                    return True
        if isinstance(above, cst.FunctionDef):
            break
        below = above
    return False


def _asks(file: File, test: cst.BaseExpression, text: str) -> bool | None:
    """True for `isinstance(text, FSDP)`, False for its negation, None for anything else."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        answer = _asks(file, test.expression, text)
        return None if answer is None else not answer
    if not isinstance(test, cst.Call) or dotted(test.func) != "isinstance" or len(test.args) != 2:
        return None
    found = file.api(test.args[1].value)
    same = dotted(test.args[0].value) == text
    return True if same and found is not None and found.name == api.FSDP else None


def _leaves_block(body: cst.BaseSuite) -> bool:
    last = body.body[-1]
    small = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return isinstance(small, cst.Return | cst.Raise | cst.Continue | cst.Break)
