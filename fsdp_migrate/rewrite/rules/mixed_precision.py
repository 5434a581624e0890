from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File, Use
from fsdp_migrate.rewrite.rule import Example, Rule
from fsdp_migrate.rewrite.values import is_none, truth
from fsdp_migrate.rewrite.wrap import Undecided

FIELDS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)


class MixedPrecisionObject(Rule):
    """
    `MixedPrecision(...)` becomes `MixedPrecisionPolicy(...)`.

    `param_dtype`, `reduce_dtype` and `cast_forward_inputs` keep their meaning. FSDP2 leaves
    buffers in their own dtype, so `buffer_dtype` goes, with a line in the report.
    """

    name = "mixed-precision"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import MixedPrecision

                bf16 = MixedPrecision(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.float32,
                    buffer_dtype=torch.bfloat16,
                )
            """,
            after="""
                from torch.distributed.fsdp import MixedPrecisionPolicy

                bf16 = MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16,
                    reduce_dtype=torch.float32,
                )
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for use in list(file.uses("MixedPrecision")):
            if use.call is None:
                continue
            try:
                self._constructor(file, use, use.call)
            except Undecided as reason:
                file.todo(use.node, use.api, str(reason))

    def _constructor(self, file: File, use: Use, call: cst.Call) -> None:
        given = self._fields(call)
        if not is_none(given.get("keep_low_precision_grads")) and (
            "keep_low_precision_grads" in given
            and truth(given["keep_low_precision_grads"]) is not False
        ):
            raise Undecided("keep_low_precision_grads: FSDP2 always casts gradients back")
        kept: list[str] = [name for name in ("param_dtype", "reduce_dtype") if name in given]
        root = truth(given.get("cast_root_forward_inputs"))
        if root is False and truth(given.get("cast_forward_inputs")) is not True:
            given["cast_forward_inputs"] = given["cast_root_forward_inputs"]
            kept.append("cast_forward_inputs")
        elif truth(given.get("cast_forward_inputs")) is None and "cast_forward_inputs" in given:
            kept.append("cast_forward_inputs")
        node = use.node

        def text() -> str:
            name = file.fsdp2("MixedPrecisionPolicy", node)
            values = [f"{field}={file.render(given[field])}" for field in kept]
            return file.call(name, values, call)

        file.edits.replace(call, text)
        buffers = given.get("buffer_dtype")
        if buffers is not None and not is_none(buffers):
            message = f"buffer_dtype={file.tree.code(buffers)} dropped: buffers keep their dtype"
            if id(call) in file.casts_buffers:
                message = "floating buffers are cast after sharding; checkpoints hold them so"
            file.differs(node, use.api, message)
        else:
            file.rewritten(node, use.api, "MixedPrecisionPolicy with the same dtypes")

    @staticmethod
    def _fields(call: cst.Call) -> dict[str, cst.BaseExpression]:
        given: dict[str, cst.BaseExpression] = {}
        for position, arg in enumerate(call.args):
            if arg.star:
                raise Undecided("which fields a starred argument sets cannot be seen here")
            name = arg.keyword.value if arg.keyword else FIELDS[position]
            given[name] = arg.value
        return given
