"""
A script written for CUDA and NCCL, on a machine without: gloo ranks on the CPU.

Every call that is redirected is noted, once each, because it limits what a verdict proves. Only the
user's own code is told that CUDA is there (`is_available`, `device_count`): libraries that ask get
the truth and take their own CPU paths.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.overrides import TorchFunctionMode

from fsdp_migrate.verify.capture.patch import Patches
from fsdp_migrate.verify.capture.recorder import Recorder

CPU = torch.device("cpu")
_AMOUNTS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_DONE = (
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "init",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "set_per_process_memory_fraction",
    "set_stream",
)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def install(recorder: Recorder, patches: Patches) -> TorchFunctionMode:
    redirect = Redirect(recorder)
    _process_groups(redirect, patches)
    _meshes(redirect, patches)
    _moves(redirect)
    _cuda_module(redirect)
    _mixed_precision(redirect)
    return ToCpu(redirect)


class Redirect:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def note(self, what: str) -> None:
        self._recorder.note(f"redirected: {what}")

    def device(self, value: Any, *, bare_index: bool = False) -> Any:
        """The device a CUDA device stands for; other values as they are."""
        if isinstance(value, str) and value.split(":")[0] == "cuda":
            self.note("device cuda -> cpu")
            return "cpu"
        if isinstance(value, torch.device) and value.type == "cuda":
            self.note("device cuda -> cpu")
            return CPU
        if bare_index and isinstance(value, int) and not isinstance(value, bool):
            self.note("device index -> cpu")
            return CPU
        return value


class ToCpu(TorchFunctionMode):
    """Factory functions: `torch.randn(4, device="cuda")`."""

    def __init__(self, redirect: Redirect) -> None:
        super().__init__()
        self._redirect = redirect

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": self._redirect.device(kwargs["device"], bare_index=True)}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def _process_groups(redirect: Redirect, patches: Patches) -> None:
    def on_gloo(create: Any) -> Any:
        @functools.wraps(create)
        def created(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            if any(isinstance(value, str) and "nccl" in value for value in given):
                redirect.note("backend nccl -> gloo")
            args = tuple(_gloo(value) for value in args)
            kwargs = {key: _gloo(value) for key, value in kwargs.items() if key != "device_id"}
            return create(*args, **kwargs)

        return created

    for owner in (dist, distributed_c10d):
        patches.replace(owner, "init_process_group", on_gloo)
        patches.replace(owner, "new_group", on_gloo)


def _gloo(value: Any) -> Any:
    return "gloo" if isinstance(value, str) and "nccl" in value else value


def _meshes(redirect: Redirect, patches: Patches) -> None:
    def on_cpu(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            args = tuple(redirect.device(value) for value in args)
            return make(*args, **{key: redirect.device(v) for key, v in kwargs.items()})

        return made

    patches.replace(device_mesh, "init_device_mesh", on_cpu)
    mesh = device_mesh.DeviceMesh
    mesh.__init__ = on_cpu(mesh.__init__)  # type: ignore[method-assign]
    mesh.from_group = staticmethod(on_cpu(mesh.from_group))  # type: ignore[method-assign]


def _moves(redirect: Redirect) -> None:
    for owner in (torch.Tensor, torch.nn.Module):
        owner.to = _moved(redirect, owner.to)  # type: ignore[method-assign]
        owner.cuda = _stays(redirect)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _stays(redirect)  # type: ignore[method-assign]
    torch.nn.Module.to_empty = _moved(redirect, torch.nn.Module.to_empty)  # type: ignore[method-assign]
    torch.Tensor.record_stream = _record_nothing  # type: ignore[method-assign, assignment]


def _record_nothing(self: torch.Tensor, s: Any) -> None: ...


def _moved(redirect: Redirect, move: Any) -> Any:
    @functools.wraps(move)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (redirect.device(args[0], bare_index=True), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = redirect.device(kwargs["device"], bare_index=True)
        return move(self, *args, **kwargs)

    return moved


def _stays(redirect: Redirect) -> Any:
    def stays(self: Any, *_: Any, **__: Any) -> Any:
        redirect.note("device cuda -> cpu")
        return self

    return stays


def _cuda_module(redirect: Redirect) -> None:
    cuda: Any = torch.cuda
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _for_user_code(redirect, "is_available", lambda *_: True)
    _for_user_code(redirect, "device_count", lambda *_: local_ranks)
    # FSDP1 asks its device for the size of a node when HYBRID_SHARD is given no mesh.
    torch.cpu.device_count = lambda: local_ranks
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    answers: dict[str, Any] = {
        "current_device": local_rank,
        "get_device_name": "cpu (redirected from cuda)",
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "mem_get_info": (1 << 34, 1 << 34),
        "memory_summary": "",
        "utilization": 0,
        "get_device_properties": SimpleNamespace(
            name="cpu", total_memory=1 << 34, major=8, minor=0, multi_processor_count=1
        ),
        "memory_stats": {},
        "memory_snapshot": [],
        **dict.fromkeys(_AMOUNTS, 0),
        **dict.fromkeys(_DONE, None),
    }
    for name, answer in answers.items():
        setattr(cuda, name, functools.partial(_answer, redirect, name, answer))
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.set_rng_state_all = lambda states: torch.set_rng_state(states[0])
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.amp.autocast = functools.partial(torch.autocast, "cpu")


def _answer(redirect: Redirect, name: str, answer: Any, *_: Any, **__: Any) -> Any:
    redirect.note(f"torch.cuda.{name}")
    return answer


def _for_user_code(redirect: Redirect, name: str, answer: Any) -> None:
    truth = getattr(torch.cuda, name)

    def asked() -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(_LIBRARIES):
            return truth()
        redirect.note(f"torch.cuda.{name}")
        return answer()

    setattr(torch.cuda, name, asked)


def _mixed_precision(redirect: Redirect) -> None:
    from torch.amp import grad_scaler
    from torch.distributed.fsdp import sharded_grad_scaler

    for owner in (
        torch.autocast,
        grad_scaler.GradScaler,
        sharded_grad_scaler.ShardedGradScaler,
        torch.cuda.amp.GradScaler,
    ):
        construct = owner.__init__
        owner.__init__ = _on_cpu(redirect, construct)  # type: ignore[method-assign]


def _on_cpu(redirect: Redirect, construct: Any) -> Any:
    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = (redirect.device(args[0]), *args[1:])
        kwargs = {key: redirect.device(value) for key, value in kwargs.items()}
        construct(self, *args, **kwargs)

    return init


class Stream:
    """A CUDA stream's calls, with nothing behind them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event(Stream):
    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True
