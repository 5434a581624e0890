"""
FSDP1 on CPU ranks: what it asks of a device that the CPU cannot give.

It wants a device that is not the CPU, refuses to broadcast CPU modules, and its offloading state
dicts crash there. (The facts were measured with torch 2.13.)
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils, api

from fsdp_migrate.verify.capture.cuda_on_cpu import CPU, Redirect

_CONFIGS = (
    "FullStateDictConfig",
    "ShardedStateDictConfig",
    "LocalStateDictConfig",
    "FullOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "LocalOptimStateDictConfig",
)


def install(redirect: Redirect) -> None:
    construct = FullyShardedDataParallel.__init__
    parameters = inspect.signature(construct)

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = parameters.bind(self, *args, **kwargs)
        given.arguments["device_id"] = CPU
        offload = given.arguments.get("cpu_offload")
        if getattr(offload, "offload_params", False):
            redirect.note("FSDP1 cpu_offload dropped: the parameters are on the CPU already")
            given.arguments["cpu_offload"] = None
        construct(*given.args, **given.kwargs)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]
    # The broadcast itself works on CPU tensors; only this check refuses them.
    if hasattr(_init_utils, "_check_module_states_for_sync_module_states"):
        _init_utils._check_module_states_for_sync_module_states = _accept
    for name in _CONFIGS:
        _never_offload(redirect, getattr(api, name))
    _state_stays()
    _unpinned(redirect)


def _accept(module_states: list[Any]) -> None: ...


def _never_offload(redirect: Redirect, config: Any) -> None:
    construct = config.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if getattr(self, "offload_to_cpu", False):
            redirect.note("FSDP1 offload_to_cpu dropped: the state is on the CPU already")
        self.offload_to_cpu = False

    config.__init__ = init


def _state_stays() -> None:
    """Offloading optimizer state that is on the CPU returns tensors that later steps write to."""
    gather: Any = FullyShardedDataParallel._optim_state_dict_impl

    def gathered(*args: Any, **kwargs: Any) -> Any:
        return gather(*args, **{**kwargs, "cpu_offload": False})

    FullyShardedDataParallel._optim_state_dict_impl = staticmethod(gathered)  # type: ignore[method-assign]


def _unpinned(redirect: Redirect) -> None:
    """FSDP2's offload policy pins memory for transfers to a device that is not there."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    construct = CPUOffloadPolicy.__init__

    @functools.wraps(construct)
    def init(self: Any, pin_memory: bool = True) -> None:
        if pin_memory:
            redirect.note("CPUOffloadPolicy(pin_memory=True) -> False")
        construct(self, pin_memory=False)

    CPUOffloadPolicy.__init__ = init  # type: ignore[method-assign]
