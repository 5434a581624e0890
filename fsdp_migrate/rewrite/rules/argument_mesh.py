from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite.devices import device_type
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import argument as argument_of
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import Argument, Translation, Undecided

_INIT = "torch.distributed.device_mesh.init_device_mesh"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_NAMES = 'mesh_dim_names=("replicate", "shard")'


class MeshArgument(ArgumentRule):
    """
    `device_mesh=` becomes `mesh=`; a process group becomes a mesh made of it.

    A mesh keeps its dimensions' order. `fully_shard` refuses a 2-D mesh without dimension names,
    so they are added where the mesh is made. FSDP1's pair of groups is (shard, replicate), a
    mesh is (replicate, shard).
    """

    name = "device-mesh"
    arguments = ("device_mesh", "process_group")
    examples = (
        Example(
            before="""
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import ShardingStrategy

                mesh = init_device_mesh("cuda", (2, 4))
                model = FSDP(
                    model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD
                )
            """,
            after="""
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
                fully_shard(model, mesh=mesh)
            """,
        ),
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

                model = FSDP(model, process_group=group)
            """,
            after="""
                from torch.distributed.device_mesh import DeviceMesh
                from torch.distributed.fsdp import fully_shard

                fully_shard(model, mesh=DeviceMesh.from_group(group, "cuda"))
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file = argument.value, into.file
        if is_none(value):
            return "rewritten", "the default group is the default mesh"
        if argument.name == "process_group":
            return self._group(value, into)
        into.mesh = lambda: file.render(value)
        return self._named(value, into, file)

    @staticmethod
    def _named(
        value: cst.BaseExpression, translation: Translation, file: File
    ) -> tuple[State, str]:
        """Give the mesh's dimensions names where it is made."""
        made = file.values.only(value)
        if isinstance(made, cst.Subscript):
            return "rewritten", "the same mesh"
        if not isinstance(made, cst.Call) or file.qualified(made.func) not in (_INIT, _MESH):
            return "differs", "the same mesh; a 2-D mesh must have mesh_dim_names"
        if argument_of(made, "mesh_dim_names") is not None:
            return "rewritten", "the same mesh"
        shape = argument_of(made, "mesh_shape", 1) or argument_of(made, "mesh", 1)
        dims = file.values.only(shape.value) if shape else None
        if isinstance(dims, cst.Tuple) and len(dims.elements) == 1:
            return "rewritten", "the same mesh"
        if isinstance(dims, cst.Tuple) and len(dims.elements) != 2:
            raise Undecided("which dimensions of this mesh replicate and shard")
        if not isinstance(dims, cst.Tuple) and not _hybrid(translation, file):
            return "differs", "the same mesh; a 2-D mesh must have mesh_dim_names"
        if not file.edits.is_replaced(made):
            call = made

            def text() -> str:
                passed = [file.render(arg).rstrip().rstrip(",") for arg in call.args]
                return file.call(file.render(call.func), [*passed, _NAMES], call)

            file.edits.replace(made, text)
        return "rewritten", "the same mesh, its dimensions named replicate and shard"

    @staticmethod
    def _group(value: cst.BaseExpression, translation: Translation) -> tuple[State, str]:
        file, at = translation.file, translation.at
        plain = file.values.only(value)
        pair = isinstance(plain, cst.Tuple) and len(plain.elements) == 2
        if not pair and not _hybrid(translation, file):

            def one() -> str:
                mesh = file.name(_MESH, at)
                kind = device_type(file, translation)
                return f"{mesh}.from_group({file.render(value)}, {kind})"

            translation.mesh = one
            return "rewritten", "a mesh made of the same group"

        if not file.options.unsafe:
            raise Undecided(
                "a pair of process groups: build a 2-D mesh of the same ranks, or use --unsafe"
                " to take consecutive ranks as the shard groups"
            )

        def two() -> str:
            if pair and plain is value:
                assert isinstance(plain, cst.Tuple)
                shard, replicate = (file.render(item.value) for item in plain.elements)
            else:
                shard, replicate = (f"{file.render(value)}[{place}]" for place in (0, 1))
            size = file.name("torch.distributed.get_world_size", at)
            ranks = f"{file.name('torch.arange', at)}({size}()).view(-1, {size}({shard}))"
            passed = [f"[{replicate}, {shard}]", device_type(file, translation)]
            passed += [f"mesh={ranks}", _NAMES]
            return file.call(f"{file.name(_MESH, at)}.from_group", passed, at)

        translation.mesh = two
        return "differs", "a 2-D mesh of the same groups; its rows are taken as consecutive ranks"


def _hybrid(translation: Translation, file: File) -> bool:
    value = translation.value("sharding_strategy")
    found = file.api(file.values.only(value)) if value is not None else None
    return found is not None and "HYBRID" in str(found.member)
