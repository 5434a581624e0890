"""
Real FullyShardedDataParallel layouts at any world size, in one process.

torch's fake process group does no communication, and FSDP needs none to flatten and shard: each
rank is built in turn, and its shards are taken as they are.
"""

import contextlib
import io
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_migrate.checkpoint.contents import RankTree
from fsdp_migrate.checkpoint.names import clean
from fsdp_migrate.checkpoint.tensors import Extent, Item, Store, Tensor
from fsdp_migrate.checkpoint.torch_file import read_torch_file


@dataclass(frozen=True)
class Node:
    """A module: shapes of its own parameters (True: transposed in memory), and its children."""

    shapes: tuple[tuple[tuple[int, ...], bool], ...]
    children: tuple["Node", ...] = ()
    wrapped: bool = False
    ignored: bool = False


@dataclass(frozen=True)
class Setup:
    node: Node
    world_size: int
    orig: bool
    bf16: bool = False
    ties: int = 0
    dealt: int | None = None  # seed: parameters go to two param groups, or to none (frozen)


class Module(nn.Module):
    def __init__(self, node: Node, counter: list[int]) -> None:
        super().__init__()
        self.node = node
        for at, (shape, transposed) in enumerate(node.shapes):
            numel = 1
            for size in shape:
                numel *= size
            values = torch.arange(counter[0], counter[0] + numel, dtype=torch.float32)
            counter[0] += numel + 100
            value = values.view(shape)
            if transposed:
                value = value.t().contiguous().t() if len(shape) == 2 else value
            self.register_parameter(f"p{at}", nn.Parameter(value))
        for at, child in enumerate(node.children):
            self.add_module(f"c{at}", Module(child, counter))


def build(setup: Setup) -> Module:
    """
    The same model each time; `ties` pairs of parameters of equal shape are one parameter.

    Across FSDP units only with use_orig_params=False: with True such a model cannot run.
    """
    model = Module(setup.node, [1000])
    ties = setup.ties
    seen: dict[object, nn.Parameter] = {}
    units = [""]
    for path, module in model.named_modules():
        if module.node.wrapped:
            units.append(path)
        unit = max((u for u in units if not u or f"{path}.".startswith(f"{u}.")), key=len)
        home = (unit, module.node.ignored) if setup.orig else module.node.ignored
        for name, parameter in list(module.named_parameters(recurse=False)):
            first = seen.setdefault((home, parameter.shape, parameter.stride()), parameter)
            if first is not parameter and ties and parameter.numel():
                setattr(module, name, first)
                ties -= 1
    return model


class Refused(Exception):
    """FSDP itself does not take the model."""


@dataclass
class Saved:
    """What the ranks hold: `views` as rank files show them, `pieces` as a DCP directory does."""

    flats: dict[str, Tensor] = field(default_factory=dict)
    views: dict[str, dict[str, int]] = field(default_factory=dict)
    pieces: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=dict)
    optimizers: list[RankTree] = field(default_factory=list)


@contextlib.contextmanager
def rank(number: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(setup: Setup, folder: Path) -> Saved:
    """Wrap the model as every rank does, and write down what each holds."""
    saved = Saved()
    shards: dict[str, list[Extent]] = {}
    for number in range(setup.world_size):
        with (
            rank(number, setup.world_size),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            _shard(setup, folder, number, saved, shards)
    for prefix, handle in saved.handles.items():
        numel = handle.flat_param._unpadded_unsharded_size.numel()
        extents = [
            e._replace(stop=min(e.stop, numel))
            for e in shards[prefix]
            if e.start < min(e.stop, numel)
        ]
        key = f"{prefix}._flat_param".lstrip(".")
        saved.flats[prefix] = Tensor(key, "float32", (numel,), tuple(extents))
    return saved


def _shard(
    setup: Setup, folder: Path, number: int, saved: Saved, shards: dict[str, list[Extent]]
) -> None:
    model = build(setup)
    ignored = [m for m in model.modules() if m.node.ignored]
    try:
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m.node.wrapped),
            use_orig_params=setup.orig,
            device_id=torch.device("cpu"),
            ignored_modules=ignored or None,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if setup.bf16 else None,
        )
    except (AssertionError, ValueError, RuntimeError) as error:
        raise Refused(str(error)) from None
    skipped = {id(p) for m in ignored for p in m.parameters()}
    for name, module in wrapped.named_modules():
        handle = getattr(module, "_handle", None)
        if isinstance(module, FullyShardedDataParallel) and handle is not None:
            prefix, flat = clean(name), handle.flat_param.detach()
            saved.handles.setdefault(prefix, handle)
            file = _write(folder / f"{prefix or 'root'}-{number}.bin", flat)
            at = number * flat.numel()
            shards.setdefault(prefix, []).append(Extent(at, at + flat.numel(), file, 0))
    if setup.orig:
        _views(wrapped, saved, skipped, number, setup.world_size, folder)
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        if id(parameter) in skipped and number == 0:
            file = _write(folder / f"{clean(name)}.bin", parameter.detach().contiguous())
            extent = Extent(0, parameter.numel(), file, 0)
            shape = tuple(parameter.shape)
            saved.whole[clean(name)] = Tensor(clean(name), "float32", shape, (extent,))
    groups: list[list[nn.Parameter]] = [[], [], []]
    deal = random.Random(setup.dealt)
    for parameter in wrapped.parameters():
        groups[0 if setup.dealt is None else deal.randrange(3)].append(parameter)
    listed = [{"params": group} for group in groups[:2] if group]
    if not listed:
        raise Refused("an optimizer without parameters")
    optimizer = torch.optim.SGD(listed, lr=0.1, momentum=0.9)
    for parameter in (p for group in listed for p in group["params"]):
        if parameter.numel():
            state = {"momentum_buffer": parameter.detach().clone(), "step": torch.tensor(3.0)}
            optimizer.state[parameter] = state
    path = folder / f"optim-{number}.pt"
    torch.save(optimizer.state_dict(), path)
    saved.optimizers.append(RankTree(number, read_torch_file(path).tree))


def _views(
    wrapped: nn.Module,
    saved: Saved,
    skipped: set[int],
    number: int,
    world_size: int,
    folder: Path,
) -> None:
    """Where the local piece of each original parameter lies in its flat parameter."""
    owner = {
        fqn: (prefix, handle)
        for prefix, module in wrapped.named_modules()
        if (handle := getattr(module, "_handle", None)) is not None
        for fqn in _fqns(prefix, handle)
    }
    for name, parameter in wrapped.named_parameters(remove_duplicate=False):
        if id(parameter) in skipped or "_flat_param" in name:
            continue
        prefix, handle = owner[clean(name)]
        if parameter.numel():
            at = number * handle.flat_param.numel() + parameter.storage_offset()
            known = saved.views.setdefault(clean(prefix), {})
            known[clean(name)] = min(at, known.get(clean(name), at))
        file = _write(folder / f"{clean(name)}-{number}.piece", parameter.detach())
        store: Store = Item(file, 0, parameter.numel() * 4, clean(name))
        extent = Extent(0, parameter.numel(), store, 0)
        # DCP keeps the copy of any one rank.
        if number == len(clean(name)) % world_size or clean(name) not in saved.pieces:
            shape = (parameter.numel(),)
            saved.pieces[clean(name)] = Tensor(clean(name), "float32", shape, (extent,))


def _fqns(prefix: str, handle: Any) -> Sequence[str]:
    base = f"{clean(prefix)}." if clean(prefix) else ""
    shared = [
        f"{info.module_name}.{info.param_name}".lstrip(".")
        for info in handle.flat_param._shared_param_infos
    ]
    return [base + clean(fqn) for fqn in (*handle.flat_param._fqns, *shared)]


def _write(path: Path, tensor: torch.Tensor) -> Path:
    path.write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return path
