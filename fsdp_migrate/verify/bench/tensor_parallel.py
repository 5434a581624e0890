"""
A tensor-parallel plan for Llama-shaped models of transformers.

Llama-shaped means that a block holds exactly the parameters named below, and the rest of the model
is an input embedding, a final norm and an output head. A parameter that the plan does not know
would be trained wrongly without an error (a norm inside the attention heads gets only its own
heads' part of the gradient), so such a model is refused.

Every parameter ends up on the tensor-parallel mesh, replicated where it isn't cut: parameters on
different meshes cannot meet in one foreach optimizer step or gradient norm.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fsdp_migrate.errors import Unsupported

COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


class Replicated(ParallelStyle):
    """The module computes the same on every rank; its parameters live on the mesh all the same."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            first = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
            return (first, *inputs[1:])

        def leave(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def cut(model: nn.Module, blocks: tuple[nn.Module, ...], mesh: DeviceMesh) -> None:
    """Spread `model` over `mesh` (one dimension), in place; `Unsupported` says why it cannot be."""
    _check_shape(model, blocks)
    _check_divisible(model, mesh.size())
    embedding, head = _ends(model)
    tied = head.weight is embedding.weight
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    plan |= {name: Replicated() for name in NORMS}
    for block in blocks:
        parallelize_module(block, mesh, plan)
    names = {id(module): name for name, module in model.named_modules()}
    ends: dict[str, ParallelStyle] = {
        names[id(embedding)]: RowwiseParallel(input_layouts=Replicate()),
        names[id(head)]: ColwiseParallel(output_layouts=Replicate()),
        **{name: Replicated() for name in _outside(model, blocks) if name.endswith("norm")},
    }
    parallelize_module(model, mesh, ends)
    if tied:  # both were cut along the vocabulary, each from its own copy
        head.weight = embedding.weight


def _check_shape(model: nn.Module, blocks: tuple[nn.Module, ...]) -> None:
    embedding, head = _ends(model)
    known = {*COLUMNS, *ROWS, *NORMS}
    for block in blocks:
        owners = {name.rpartition(".")[0] for name, _ in block.named_parameters()}
        if owners != known:
            odd = ", ".join(sorted(owners ^ known))
            raise Unsupported(f"{type(block).__name__} is not Llama-shaped: {odd}")
    for name, module in _outside(model, blocks).items():
        if module is not embedding and module is not head and not name.endswith("norm"):
            raise Unsupported(f"{type(model).__name__} is not Llama-shaped: it has {name}")


def _check_divisible(model: nn.Module, parts: int) -> None:
    config: Any = model.config
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        size = getattr(config, field, None)
        if size is None or size % parts:
            raise Unsupported(f"{field} {size} is not divisible by TP={parts}")


def _ends(model: nn.Module) -> tuple[Any, Any]:
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embedding = head = None
    if embedding is None or head is None:
        raise Unsupported(
            f"the plan is for Llama-shaped models of transformers; {type(model).__name__} isn't one"
        )
    return embedding, head


def _outside(model: nn.Module, blocks: tuple[nn.Module, ...]) -> dict[str, nn.Module]:
    """The modules outside the blocks that own parameters themselves, by name."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False))
    }
