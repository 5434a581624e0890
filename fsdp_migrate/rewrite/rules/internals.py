from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import api
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.rule import Example, Rule

_ATTRIBUTES = {
    "sharding_strategy": "FSDP2 keeps no strategy: ask your own configuration",
    "process_group": "take the group from the mesh",
    "world_size": "take the size from the mesh",
    "rank": "take the rank from the mesh",
    "mixed_precision": "FSDP2 keeps it private: ask your own configuration",
    "cpu_offload": "FSDP2 keeps it private: ask your own configuration",
    "training_state": "FSDP2 keeps it private",
    "compute_device": "take the device from the mesh",
    "check_is_root": "FSDP2 does not tell root modules apart",
    "register_comm_hook": "FSDP2 has set_all_reduce_hook, another contract",
    "flatten_parameters": "there are no flat parameters",
}
# Names that nothing but FSDP1 has, whoever the receiver is.
_PRIVATE = frozenset(
    {
        "_handle",
        "_handles",
        "_all_handles",
        "_flat_param",
        "flat_param",
        "_is_root",
        "_fsdp_use_orig_params",
        "_use_orig_params",
        "_all_fsdp_states",
        "_has_params",
        "_free_unsharded_flat_param",
        "_unshard_params",
    }
)


class Internals(Rule):
    """
    Attributes of the FSDP1 wrapper have no place in FSDP2 and are left for a human.

    Flat parameters and their handles are gone, so what is done with them has to be said anew
    on DTensors.
    """

    name = "internals"
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model)
                model.register_comm_hook(None, hook)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model)
                # TODO(fsdp-migrate): internals FSDP2 has set_all_reduce_hook, another contract
                model.register_comm_hook(None, hook)
            """,
        ),
    )

    def decide(self, file: File) -> None:
        for node in file.tree.all(cst.Attribute):
            name = node.attr.value
            if file.qualified(node) or not self._is_internal(file, node, name):
                continue
            if file.open(node):
                message = _ATTRIBUTES.get(name, "FSDP2 has no flat parameters; use DTensors")
                file.todo(node, f".{name}", message)
        for call in file.tree.all(cst.Call):
            func = call.func
            if not isinstance(func, cst.Attribute) or func.attr.value != "apply":
                continue
            if file.models.is_model(func.value) and file.open(call):
                file.differs(call, ".apply()", "the function sees DTensors, shard by shard")
        for use in list(file.all_uses):
            if use.api.name.startswith("private ") and file.open(use.node):
                file.todo(use.node, use.api, "an internal of FSDP1")
            elif self._is_patch(file, use.node) and file.open(use.node):
                file.todo(use.node, use.api, "FSDP1 is monkeypatched here; FSDP2 does not see it")
            elif self._is_base(file, use.node) and file.open(use.node):
                file.todo(use.node, use.api, "a subclass of FSDP: FSDP2 wraps no module")

    @staticmethod
    def _is_internal(file: File, node: cst.Attribute, name: str) -> bool:
        if name in _ATTRIBUTES:
            return file.models.is_model(node.value)
        own = isinstance(node.value, cst.Name) and node.value.value == "self"
        return name in _PRIVATE and file.has_fsdp and not own

    @staticmethod
    def _is_patch(file: File, node: cst.CSTNode) -> bool:
        while isinstance(file.tree.parent(node), cst.Attribute):
            node = file.tree.parent(node)  # type: ignore[assignment]
        above = file.tree.parent(node)
        if isinstance(above, cst.AssignTarget):
            return True
        statement = file.tree.parent(above) if isinstance(above, cst.Arg) else None
        return isinstance(statement, cst.Call) and file.tree.code(statement.func) == "setattr"

    @staticmethod
    def _is_base(file: File, node: cst.CSTNode) -> bool:
        above = file.tree.parent(node)
        found = file.api(node)
        return (
            isinstance(above, cst.Arg)
            and isinstance(file.tree.parent(above), cst.ClassDef)
            and found is not None
            and found.name == api.FSDP
        )
