"""
`inspect-ckpt`: what a checkpoint is, as far as its files tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.checkpoint.assemble import is_flat_key
from fsdp_migrate.checkpoint.contents import Contents, shown
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.load import Loaded
from fsdp_migrate.checkpoint.tensors import Block, Tensor
from fsdp_migrate.checkpoint.ties import layout_with_ties
from fsdp_migrate.errors import OpenQuestion, TargetError


@dataclass(frozen=True, slots=True)
class TensorRow:
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: int
    role: str
    origin: str


@dataclass(frozen=True, slots=True)
class Report:
    """`dtypes` maps dtype to (tensors, elements, bytes); `coverage` is (with state, parameters)."""

    path: str
    format: str
    optimizer_format: str | None
    strategy: str
    world_size: int | None
    writer: str
    model_roots: tuple[str, ...]
    optimizer_roots: tuple[str, ...]
    dtypes: Mapping[str, tuple[int, int, int]]
    optimizer_dtypes: Mapping[str, tuple[int, int, int]]
    coverage: tuple[int, int] | None
    groups: int
    ties: tuple[tuple[str, ...], ...]
    wrappers: bool
    flat_units: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: tuple[TensorRow, ...]


def report(loaded: Loaded) -> Report:
    source, index = loaded.source, loaded.index
    parts = [part for part in (source.model, source.optimizer) if part is not None]
    optimizer = index.optimizer
    return Report(
        path=str(source.path),
        format=loaded.contents.format,
        optimizer_format=source.optimizer.contents.format if source.optimizer else None,
        strategy=_strategy(loaded.contents, loaded.flat_units),
        world_size=loaded.contents.world_size,
        writer=loaded.contents.writer,
        model_roots=tuple(shown(r) for r in source.model.sorted.model_roots)
        if source.model
        else (),
        optimizer_roots=tuple(
            shown(r)
            for part in parts[-1:]
            for r in (*part.sorted.optimizer_roots, *part.sorted.raw_roots)
        ),
        dtypes=_by_dtype(list(index.model.values())),
        optimizer_dtypes=_by_dtype(optimizer.tensors() if optimizer else []),
        coverage=_coverage(index),
        groups=len(optimizer.groups) if optimizer else 0,
        ties=ties(index),
        wrappers=any(tensor.origin != name for name, tensor in index.model.items()),
        flat_units=loaded.flat_units,
        notes=index.notes,
        tensors=tuple(
            TensorRow(name, t.dtype, t.shape, len(t.pieces), index.role(name), t.origin)
            for name, t in index.model.items()
        ),
    )


def write_layout(loaded: Loaded, path: Path) -> None:
    """
    The model's layout as JSON, for `--layout`. Raises `TargetError` where `path` exists.

    Raises `OpenQuestion` for flat parameters whose names are not known.
    """
    if any(is_flat_key((name,)) for name in loaded.index.model):
        raise OpenQuestion(
            f"{loaded.source.path} holds flat parameters, which have no names: give --model or "
            "--hf-config, or emit the layout from a checkpoint of the same model that has names"
        )
    layout = loaded.layout
    if layout is None:
        with Gatherer() as gatherer:
            origin = str(loaded.source.path)
            layout = layout_with_ties(loaded.index, origin, gatherer.read)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(layout.to_json())
    except FileExistsError:
        raise TargetError(f"{path} exists") from None
    except OSError as error:
        raise TargetError(f"{path}: {error.strerror}") from None


def ties(index: Index) -> tuple[tuple[str, ...], ...]:
    """Names that share their bytes."""
    same: dict[object, list[str]] = {}
    for name, tensor in index.model.items():
        if tensor.pieces:
            same.setdefault((tensor.pieces, tensor.shape), []).append(name)
    return tuple(tuple(names) for names in same.values() if len(names) > 1)


def _coverage(index: Index) -> tuple[int, int] | None:
    if index.optimizer is None:
        return None
    params = {name for group in index.optimizer.groups for name in group.params}
    return sum(1 for name in params if index.optimizer.state.get(name)), len(params)


def _by_dtype(tensors: list[Tensor]) -> dict[str, tuple[int, int, int]]:
    count: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in tensors:
        count[tensor.dtype] += 1
        elements[tensor.dtype] += tensor.numel
        size[tensor.dtype] += tensor.nbytes
    return {name: (count[name], elements[name], size[name]) for name in sorted(count)}


def _strategy(contents: Contents, flat_units: tuple[str, ...]) -> str:
    """The sharding as far as the files show it."""
    world, group = contents.world_size or 1, contents.group_size
    if flat_units:
        return f"flat parameters of {len(flat_units)} FSDP1 units over {group or world} ranks"
    if group is not None and group < world:
        return f"sharded over {group} ranks, {world // group} replicas (HSDP)"
    if group is not None and group > 1:
        return f"sharded over {group} ranks"
    tensors = [tensor for _, tensor in contents.tensors()]
    if any(isinstance(piece, Block) for tensor in tensors for piece in tensor.pieces):
        return "sharded on other dimensions than the first"
    if contents.format == "DCP" and any(len(tensor.pieces) > 1 for tensor in tensors):
        return f"sharded, at most {max(len(tensor.pieces) for tensor in tensors)} chunks a tensor"
    return "whole tensors"
