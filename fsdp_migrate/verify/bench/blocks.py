"""Which modules are sharded one by one: the repeated blocks of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_migrate.errors import SourceError


def blocks_of(model: nn.Module, class_name: str | None) -> tuple[nn.Module, ...]:
    """
    The model's blocks, in order: those of `class_name`; or those which transformers must not split
    (`_no_split_modules`); or the `nn.ModuleList` that holds most of the parameters.
    """
    if class_name is not None:
        found = _outermost(model, {class_name})
        if not found:
            raise SourceError(f"--block {class_name}: the model has no module of that class")
        return found
    whole = getattr(model, "_no_split_modules", None)
    if whole and (found := _outermost(model, set(whole))):
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise SourceError(
            f"{type(model).__name__} has no nn.ModuleList of blocks: name their class with --block"
        )
    return tuple(max(lists, key=_size))


def freeze_first_half(model: nn.Module, class_name: str | None) -> None:
    """Freeze every parameter up to the end of the middle block, in the model's own order."""
    blocks = blocks_of(model, class_name)
    middle = blocks[max(1, len(blocks) // 2) - 1]
    inside = {id(parameter) for parameter in middle.parameters()}
    parameters = list(model.parameters())
    last = max(i for i, parameter in enumerate(parameters) if id(parameter) in inside)
    for parameter in parameters[: last + 1]:
        parameter.requires_grad_(False)


def _outermost(model: nn.Module, class_names: set[str]) -> tuple[nn.Module, ...]:
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # parents come before their children
        if type(module).__name__ in class_names and id(module) not in inside:
            found.append(module)
            inside.update(id(child) for child in module.modules())
    return tuple(found)


def _size(blocks: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
