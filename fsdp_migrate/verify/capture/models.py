"""
The models of a running script: which modules FSDP manages, what their parameters are called.

A script may wrap its model in anything (a loss module, torch.compile, an engine), so names are
taken relative to the outermost module that FSDP manages, or, where that leaves parameters out,
relative to the outermost module that holds them. Both versions of a script then use equal names.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_migrate.verify.capture.pieces import Piece, dtensor_piece, fsdp1_pieces, plain_piece

WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module"}


def is_managed(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel | FSDPModule)


def clean(path: str) -> str:
    """A module path without the segments that wrappers add."""
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


class Models:
    """Every model that has run forward, in that order, and its pieces on this rank."""

    def __init__(self) -> None:
        self.roots: list[nn.Module] = []
        self._pieces: dict[int, list[Piece]] = {}
        self.ties: list[tuple[str, ...]] = []

    def enter(self, module: nn.Module) -> nn.Module | None:
        """The root that `module` belongs to if it is new; its pieces are known from then on."""
        if any(module is inner for root in self.roots for inner in root.modules()):
            return None
        root = _root_of(module)
        self.roots.append(root)
        self._pieces[id(root)] = list(self._find(root))
        return root

    @property
    def pieces(self) -> list[Piece]:
        return [piece for root in self.roots for piece in self._pieces[id(root)]]

    def pieces_of(self, root: nn.Module) -> list[Piece]:
        return self._pieces[id(root)]

    def prefix(self, root: nn.Module) -> str:
        """Empty for the first model, so that the usual script has the usual names."""
        index = next(i for i, known in enumerate(self.roots) if known is root)
        return f"model{index + 1}." if index else ""

    def buffers(self, root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for path, buffer in root.named_buffers():
            yield self.prefix(root) + clean(path), buffer

    def _find(self, root: nn.Module) -> Iterator[Piece]:
        """
        Parameters as their FSDP units know them, then what no unit manages.

        The modules themselves are no guide: while a unit is gathered they show plain tensors.
        """
        prefix = self.prefix(root)
        names = {module: path for path, module in root.named_modules()}

        def full(module: nn.Module, leaf: str) -> str:
            return prefix + clean(f"{names[module]}.{leaf}")

        seen: dict[int, list[str]] = {}
        for unit in names:
            if isinstance(unit, FullyShardedDataParallel):
                yield from _fsdp1_unit(unit, full, seen)
            elif isinstance(unit, FSDPModule):
                yield from _fsdp2_unit(unit, full, seen)
        managed = {name for shared in seen.values() for name in shared}
        for path, param in root.named_parameters(remove_duplicate=False):
            name = prefix + clean(path)
            if name in managed or path.endswith("_flat_param"):
                continue
            known = seen.setdefault(id(param), [])
            known.append(name)
            if len(known) == 1:
                if isinstance(param, DTensor):
                    yield dtensor_piece(name, param, None, None)
                else:
                    yield plain_piece(name, param)
        self.ties += [tuple(sorted(shared)) for shared in seen.values() if len(shared) > 1]


Name = Callable[[nn.Module, str], str]


def _fsdp1_unit(unit: Any, full: Name, seen: dict[int, list[str]]) -> Iterator[Piece]:
    if (handle := unit._handle) is None:
        return
    flat = handle.flat_param
    own = [full(info.module, info.param_name) for info in flat._param_infos]
    for name in own:
        seen[hash((id(flat), name))] = [name]
    for shared in flat._shared_param_infos:
        first = full(shared.prim_module, shared.prim_param_name)
        seen[hash((id(flat), first))].append(full(shared.module, shared.param_name))
    yield from fsdp1_pieces(handle, unit, own)


def _fsdp2_unit(unit: Any, full: Name, seen: dict[int, list[str]]) -> Iterator[Piece]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
        mesh = group.mesh_info
        degrees = (getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "replicate_mesh_size", 1))
        for param in group.fsdp_params:
            where = param._module_info
            name = full(where.module, where.param_name)
            shared = zip(where.shared_modules, where.shared_param_names, strict=True)
            seen[id(param)] = [name, *(full(module, leaf) for module, leaf in shared)]
            yield dtensor_piece(name, param.sharded_param, degrees, group.mp_policy)


def _root_of(module: nn.Module) -> nn.Module:
    tops = [top for top in _tops() if any(module is inner for inner in top.modules())]
    mine = set(map(id, module.parameters()))
    for top in tops:
        if any(id(param) not in mine for param in top.parameters()):
            return top
    return module


def _tops() -> list[nn.Module]:
    """Live modules that are in no other module."""
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    inner = {id(child) for m in modules for child in m.__dict__.get("_modules", {}).values()}
    return [m for m in modules if id(m) not in inner and "_modules" in m.__dict__]


def census(roots: list[nn.Module]) -> dict[str, int]:
    """How many modules of each kind the roots hold."""
    modules = [m for root in roots for m in root.modules()]
    live = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    return {
        "fsdp1": sum(isinstance(m, FullyShardedDataParallel) for m in modules),
        "fsdp2": sum(isinstance(m, FSDPModule) for m in modules),
        "ddp": sum(issubclass(type(m), DistributedDataParallel) for m in live),
        "compiled": sum(_is_compiled(m) for m in live),
    }


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or (
        module.__dict__.get("_compiled_call_impl") is not None
    )
