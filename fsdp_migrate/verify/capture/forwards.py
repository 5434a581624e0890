"""
Training forwards: a hash of what the model is given, and of the random state it starts from.

FSDP manages blocks inside the model too, so a forward counts only when no managed module is already
running, and not when activation checkpointing runs one again inside a backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_migrate.verify.capture import fingerprint
from fsdp_migrate.verify.capture.models import is_managed
from fsdp_migrate.verify.capture.patch import Patches
from fsdp_migrate.verify.capture.session import Session


def install(session: Session, patches: Patches) -> None:
    watch = _Watch(session)
    construct = FullyShardedDataParallel.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        watch.add(self)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]

    def watched(shard: Any) -> Any:
        @functools.wraps(shard)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = shard(module, *args, **kwargs)
            for one in module if isinstance(module, list | tuple) else [module]:
                watch.add(one)
            return result

        # `fully_shard.state` is how torch finds the FSDP state of a module.
        fully_shard.__dict__.update(getattr(shard, "__dict__", {}))
        return fully_shard

    for owner, name in _sharding_functions():
        patches.replace(owner, name, watched)


def _sharding_functions() -> Iterator[tuple[Any, str]]:
    import torch.distributed.fsdp as public

    yield public, "fully_shard"
    try:
        from torch.distributed._composable import replicate_with_fsdp

        yield replicate_with_fsdp, "replicate"
    except ImportError:
        pass


class _Watch:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.depth = 0
        self.handles: dict[nn.Module, list[Any]] = {}

    def add(self, module: nn.Module) -> None:
        if module in self.handles:
            return
        enter, leave = _outside_graphs(self._enter), _outside_graphs(self._leave)
        self.handles[module] = [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.depth += 1
        session = self.session
        if self.depth > 1 or session.backwards:
            return
        session.reach()
        session.first_forward(module)
        self._forget_inner(module)
        whole = any(module is root for root in session.models.roots)
        # Generation calls the model, or in FSDP1 its blocks, as often as each version needs.
        if not torch.is_grad_enabled() or not (whole or self._stands_alone(module)):
            return
        # A block that is called by itself is given activations, which may differ by a rounding.
        session.step.inputs.append(digest((args, kwargs), floats=whole))
        session.step.random.append(random_state(session.device))

    def _stands_alone(self, module: nn.Module) -> bool:
        """Whether FSDP manages blocks of the model only, and not the model."""
        root = next(r for r in self.session.models.roots if any(m is module for m in r.modules()))
        return not is_managed(root)

    def _leave(self, *_: Any) -> None:
        self.depth -= 1

    def _forget_inner(self, root: nn.Module) -> None:
        """Blocks need no hooks once the root is known: they cost time and break graphs."""
        for module in root.modules():
            if module is not root and is_managed(module):
                for handle in self.handles.pop(module, []):
                    handle.remove()
                self.handles[module] = []


def _outside_graphs(hook: Any) -> Any:
    return torch._dynamo.disable(hook)  # type: ignore[no-untyped-call]


def digest(value: Any, *, floats: bool) -> str:
    """A hash of all plain tensors and numbers in a structure; activations are left out."""
    return "; ".join(_leaves(value, floats))


def _leaves(value: Any, floats: bool) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        if not value.requires_grad and (floats or not value.is_floating_point()):
            local = value.to_local() if hasattr(value, "to_local") else value
            yield fingerprint.whole(local)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (f"{key}={leaf}" for leaf in _leaves(item, floats))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, floats)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        yield from _leaves(fields, floats)
    elif isinstance(value, int | float | str | bool):
        yield repr(value)


def random_state(device: str) -> str:
    prints = [fingerprint.whole(torch.get_rng_state())]
    if device == "cuda":
        prints.append(fingerprint.whole(torch.cuda.get_rng_state()))
    return " ".join(text.split()[-1] for text in prints)
