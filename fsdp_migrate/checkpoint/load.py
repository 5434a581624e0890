"""
From a path to an Index: find, read, sort, un-flatten, name. No tensor's bytes are read, except
where a proof needs a few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_migrate.checkpoint import replicas, sources
from fsdp_migrate.checkpoint.assemble import is_flat_key
from fsdp_migrate.checkpoint.contents import Contents, foreign_in, shown
from fsdp_migrate.checkpoint.index import Index, Optimizer, Role
from fsdp_migrate.checkpoint.names import cleaned
from fsdp_migrate.checkpoint.sorting import choose, keyed_optimizer, model_values
from fsdp_migrate.checkpoint.sources import Part, Source
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Incomplete, OpenQuestion


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """
    What the user may have to say about a source.

    `model`, `hf_config`, `layout`: where the layout of flat parameters comes from. The roots name
    one of several models or optimizers inside a file.
    """

    with_optimizer: bool = True
    optimizer_from: Path | None = None
    model_root: str | None = None
    optimizer_root: str | None = None
    model: str | None = None
    hf_config: Path | None = None
    layout: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """`contents` are those of the model's part, or of the optimizer's where there is no model."""

    source: Source
    contents: Contents
    index: Index
    flat_units: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def load(
    path: Path,
    options: LoadOptions,
    *,
    compare_replicas: bool = True,
    for_inspection: bool = False,
) -> Loaded:
    """
    Raises the errors of `fsdp_migrate.errors`, exit codes 3 and 5.

    `for_inspection`: flat parameters and raw optimizers without a layout are shown as they are.
    """
    source = sources.find(path, options.optimizer_from)
    notes: list[str] = []
    model: dict[str, Tensor] = {}
    roles: dict[str, Role] = {}
    if source.model is not None:
        model, roles = _model(source.model, options, notes)
        _report_extras(source.model, notes)
    optimizer = None
    if options.with_optimizer and source.optimizer is not None:
        optimizer = _optimizer(source.optimizer, options, model, roles)
        _check_coverage(optimizer, model)
    if compare_replicas:
        for part in {id(p): p for p in (source.model, source.optimizer) if p is not None}.values():
            for name in replicas.check(part.contents.replicas, part.contents.roles):
                notes.append(f"{name}: differs between ranks; rank 0's is taken, as FSDP does")
    if source.beside:
        notes.append(f"not converted: {', '.join(source.beside)}")
    main = source.model or source.optimizer
    assert main is not None
    index = Index(model, optimizer, roles, {}, tuple(notes))
    return Loaded(source, main.contents, index)


def _model(
    part: Part, options: LoadOptions, notes: list[str]
) -> tuple[dict[str, Tensor], dict[str, Role]]:
    root = choose("model", part.sorted.model_roots, options.model_root)
    assert root is not None
    values = model_values(part.contents, root)
    new = cleaned(values)
    _check_distinct(new)
    if any(is_flat_key((name,)) for name in values):
        raise OpenQuestion("flat parameters need a layout")  # replaced by the flat step
    model = {}
    for name, tensor in values.items():
        model[new[name]] = Tensor(new[name], tensor.dtype, tensor.shape, tensor.pieces, name)
    roles = {new[name]: part.contents.roles.get((*root, name), "unknown") for name in values}
    others = [r for r in part.sorted.model_roots if r != root]
    if others:
        notes.append(f"not converted: {', '.join(map(shown, others))}")
    return model, roles


def _optimizer(
    part: Part, options: LoadOptions, model: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> Optimizer:
    roots = [*part.sorted.optimizer_roots, *part.sorted.raw_roots]
    root = choose("optimizer", roots, options.optimizer_root)
    assert root is not None
    if root in part.contents.raw:
        raise OpenQuestion("raw optimizers need names")  # replaced by the raw step
    return keyed_optimizer(part.contents, root)


def _check_distinct(new: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, name in new.items():
        if name in seen:
            raise Incomplete(f"{seen[name]} and {old} are both {name} without their wrappers")
        seen[name] = old


def _check_coverage(optimizer: Optimizer, model: Mapping[str, Tensor]) -> None:
    """Every state must belong to a parameter, and elementwise states have its shape."""
    if not model:
        return
    unknown = [name for name in optimizer.state if name not in model]
    if unknown:
        raise Incomplete(
            f"the optimizer has state for {unknown[0]}"
            + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
            + ", which the model does not have; do the two belong together?"
        )


def _report_extras(part: Part, notes: list[str]) -> None:
    tops: dict[str, None] = {}
    for path in part.sorted.extras:
        value = part.contents.values[path]
        alien = foreign_in(value)
        tops[f"{shown(path[:1])}" + (f" ({alien.qualified})" if alien else "")] = None
    if tops:
        notes.append(f"not converted, not part of the model: {', '.join(tops)}")
