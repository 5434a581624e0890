"""
Methods other than `forward` that compute with a sharded model.

FSDP2 gathers parameters around `forward` only; any other method that computes has to be
registered once the model is sharded.
"""

from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.names import dotted
from fsdp_migrate.rewrite.tree import walk

_KNOWN = frozenset(
    {
        "generate",
        "sample",
        "encode",
        "decode",
        "encode_image",
        "encode_text",
        "encode_prompt",
        "get_image_features",
        "get_text_features",
        "compute_loss",
        "get_loss",
        "loss",
        "training_step",
        "validation_step",
        "predict",
        "score",
        "inference",
        "log_prob",
        "logprobs",
        "get_logits",
        "forward_features",
        "forward_backward",
    }
)


def computing_calls(file: File, scope: cst.CSTNode, model: cst.BaseExpression) -> list[cst.Call]:
    """The calls in `scope` that compute with `model`: itself, or a method known to."""
    text = file.tree.code(model)
    found = []
    for node in walk(scope):
        if not isinstance(node, cst.Call):
            continue
        if (dotted(node.func) is not None and file.tree.code(node.func) == text) or method_of(
            file, node, text
        ) is not None:
            found.append(node)
    return found


def method_of(file: File, call: cst.Call, model: str) -> str | None:
    """The name of the computing method of `model` that is called, if it is one."""
    func = call.func
    if not isinstance(func, cst.Attribute):
        return None
    receiver = file.tree.code(func.value)
    for inner in (".module", "._fsdp_wrapped_module"):
        receiver = receiver.removesuffix(inner)
    name = func.attr.value
    return name if receiver == model and computes(file, name) else None


def computes(file: File, name: str) -> bool:
    """Whether a method of this name runs parameters through more than `forward`."""
    if name not in file.computing:
        defined = [
            function
            for function in file.tree.all(cst.FunctionDef)
            if function.name.value == name and _is_module_method(file, function)
        ]
        by_body = any(_uses_submodules(function) for function in defined)
        file.computing[name] = by_body if defined else name in _KNOWN
    return file.computing[name]


def _is_module_method(file: File, function: cst.FunctionDef) -> bool:
    holder = file.tree.nearest(function, (cst.ClassDef, cst.FunctionDef))
    if not isinstance(holder, cst.ClassDef):
        return False
    return any(
        isinstance(node, cst.FunctionDef) and node.name.value == "forward" for node in walk(holder)
    )


def _uses_submodules(function: cst.FunctionDef) -> bool:
    """`self(...)`, `self.layer(...)` or `self.weight` in the body; plain getters have none."""
    for node in walk(function.body):
        if isinstance(node, cst.Call):
            text = dotted(node.func) or ""
            if text == "self" or text.startswith("self."):
                return True
        elif isinstance(node, cst.Attribute) and node.attr.value in ("weight", "bias"):
            return True
    return False


def register(file: File, model: cst.BaseExpression, call: cst.Call) -> bool:
    """
    Have the method that `call` calls registered where its model is sharded; False if it cannot.
    """
    name = method_of(file, call, file.tree.code(model))
    if name is None:
        return True
    text = file.tree.code(model)
    named = [wrapped for wrapped in file.wraps if text in wrapped.names]
    last = text.split(".")[-1]
    named = named or [
        wrapped for wrapped in file.wraps if any(n.split(".")[-1] == last for n in wrapped.names)
    ]
    named = named or (file.wraps if len(file.wraps) == 1 else [])
    if not all(wrapped.placeable for wrapped in named):
        return False
    for wrapped in named:
        registered = file.registered.setdefault(id(wrapped), [])
        if name in registered:
            continue
        registered.append(name)
        at = wrapped.call

        def line(model: str, at: cst.CSTNode = at) -> str:
            return f'{file.fsdp2("register_fsdp_forward_method", at)}({model}, "{name}")'

        wrapped.translation.after.append(line)
    return bool(named)
