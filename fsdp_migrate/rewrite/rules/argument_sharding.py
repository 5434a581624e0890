from __future__ import annotations

import libcst as cst

from fsdp_migrate.rewrite import snippets
from fsdp_migrate.rewrite.devices import device_type, local_size
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.rule import Example
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.values import is_none
from fsdp_migrate.rewrite.wrap import Argument, Make, Translation

_NO_RESHARD = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
_TWO_DIMENSIONS = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")


class ShardingStrategyArgument(ArgumentRule):
    """
    `sharding_strategy=` becomes `reshard_after_forward=` and, where ranks hold replicas, a mesh.

    FULL_SHARD is the default and left out: that is the only spelling with FSDP1's meaning for the
    root module in every torch version. SHARD_GRAD_OP is `reshard_after_forward=False`. HYBRID
    strategies need a 2-D mesh of (replicate, shard), NO_SHARD one of (world, 1). A strategy that
    only the run knows goes by its name, through a helper that refuses unknown names.
    """

    name = "sharding-strategy"
    arguments = ("sharding_strategy",)
    examples = (
        Example(
            before="""
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import ShardingStrategy

                model = FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
            """,
            after="""
                from torch.distributed.fsdp import fully_shard

                fully_shard(model, reshard_after_forward=False)
            """,
        ),
        Example(
            before="""
                import torch
                import torch.distributed as dist
                from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
                from torch.distributed.fsdp import ShardingStrategy

                model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
            """,
            after="""
                import torch
                import torch.distributed as dist
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh(
                    "cuda",
                    (dist.get_world_size() // torch.cuda.device_count(), torch.cuda.device_count()),
                    mesh_dim_names=("replicate", "shard"),
                )
                fully_shard(model, mesh=mesh)
            """,
        ),
    )

    def translate(self, argument: Argument, into: Translation) -> tuple[State, str]:
        value, file = argument.value, into.file
        if is_none(value):
            return "rewritten", "FULL_SHARD is the default"
        plain = file.values.only(value)
        found = file.api(plain)
        if found is None or found.name != "ShardingStrategy" or found.member is None:
            return self._by_name(value, into)
        if plain is value:
            file.covered(value)
        file.values.consume(value)
        return self._literal(found.member, into)

    @staticmethod
    def _literal(member: str, translation: Translation) -> tuple[State, str]:
        if member in _TWO_DIMENSIONS and not _has_mesh(translation):
            _make_mesh(member, translation)
        if member in _NO_RESHARD:
            translation.keywords.append(("reshard_after_forward", lambda: "False"))
        if member == "NO_SHARD":
            return "differs", "a (world, 1) mesh: parameters are whole, yet DTensors"
        if member in _TWO_DIMENSIONS:
            return "rewritten", f"{member} is a 2-D mesh of (replicate, shard)"
        if member == "SHARD_GRAD_OP":
            return "rewritten", "SHARD_GRAD_OP is reshard_after_forward=False"
        return "rewritten", "FULL_SHARD is the default"

    @staticmethod
    def _by_name(value: cst.BaseExpression, translation: Translation) -> tuple[State, str]:
        file = translation.file

        def made(mesh: Make | None) -> str:
            helper = snippets.sharding_arguments(file)
            passed = [file.render(value), device_type(file, translation)]
            if mesh is not None:
                passed.append(f"mesh={mesh()}")
            return f"{helper}({', '.join(passed)})"

        translation.strategy = made
        file.strategy_by_name = True
        return "rewritten", "by name at run time; an unknown name is an error"


def _has_mesh(translation: Translation) -> bool:
    given = (translation.value("device_mesh"), translation.value("process_group"))
    return any(value is not None and not is_none(value) for value in given)


def _make_mesh(member: str, translation: Translation) -> None:
    """The mesh gets a variable of its own."""
    file, at = translation.file, translation.at

    def build() -> str:
        world = file.name("torch.distributed.get_world_size", at) + "()"
        local = local_size(file, translation, at)
        shape = f"({world}, 1)" if member == "NO_SHARD" else f"({world} // {local}, {local})"
        init = file.name("torch.distributed.device_mesh.init_device_mesh", at)
        kind = device_type(file, translation)
        names = 'mesh_dim_names=("replicate", "shard")'
        name = file.needs.local("mesh", at)
        return f"{name} = " + file.call(init, [kind, shape, names], at)

    translation.setup.append(build)
    translation.mesh = lambda: file.needs.local("mesh", at)
