from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.forwards import computes, method_of, register
from fsdp_migrate.rewrite.rule import Example, Rule


class ForwardMethod(Rule):
    """
    A method other than `forward` that computes is registered after sharding.

    FSDP2 gathers parameters around `forward` alone; `model.generate(...)` or an encoder method
    that is called directly would meet sharded ones.
    """

    name = "forward-method"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                features = model.encode_image(images)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

                fully_shard(model)
                register_fsdp_forward_method(model, "encode_image")
                features = model.encode_image(images)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        if not file.is_fsdp1:
            return
        for call in file.tree.all(cst.Call):
            func = call.func
            if not isinstance(func, cst.Attribute):
                continue
            model = func.value
            while isinstance(model, cst.Attribute) and model.attr.value in (
                "module",
                "_fsdp_wrapped_module",
            ):
                model = model.value
            if not file.models.is_model(model) or not computes(file, func.attr.value):
                continue
            if not file.open(call):
                continue
            if method_of(file, call, file.tree.code(model)):
                what = f".{func.attr.value}()"
                if register(file, model, call):
                    file.rewritten(call, what, "registered, so that FSDP2 gathers around it")
                else:
                    message = f'call register_fsdp_forward_method(model, "{func.attr.value}")'
                    file.todo(call, what, f"{message} where the model is sharded")
