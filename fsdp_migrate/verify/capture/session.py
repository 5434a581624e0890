"""
The record of one run on one rank.

The hooks report here: a root forward, a backward, a clip, an optimizer step. A step is over when
the first optimizer seen (the primary one) steps again, and the run is over at the first forward or
backward after the last wanted step, so that other optimizers and schedulers had their turn. It
then ends inside the hook: no exception travels through the user's code, which might catch it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_migrate.verify.capture import fingerprint
from fsdp_migrate.verify.capture.models import Models, census, is_managed
from fsdp_migrate.verify.capture.pieces import Piece
from fsdp_migrate.verify.capture.recorder import Recorder
from fsdp_migrate.verify.trial import Clip, Final, Model, Parameter, Part, Step, Trial


@dataclass
class Open:
    """The step being recorded."""

    losses: list[float] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    raw: dict[str, float | None] = field(default_factory=dict)
    final: dict[str, float | None] = field(default_factory=dict)
    clips: list[Clip] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    scale: float = 1.0
    seconds: float | None = None
    peak: int = 0

    def close(self) -> Step:
        step: dict[str, Any] = {}
        for name, value in vars(self).items():
            step[name] = tuple(value) if isinstance(value, list) else value
        return Step(**step)


class Session:
    def __init__(
        self,
        trial: Trial,
        rank: int,
        device: str,
        recorder: Recorder,
        leave: Callable[[], NoReturn],
    ) -> None:
        self.trial = trial
        self.rank = rank
        self.device = device
        self.recorder = recorder
        self.models = Models()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.step = Open()
        self.stepped = 0  # steps that the primary optimizer has made
        self.emitted = 0
        self.loss_scale = 1.0  # a GradScaler's factor that the gradients still carry
        self.clipping = False
        self.backwards = 0  # depth of backward calls
        self.exact_calls = 0
        self.exact_clips = 0
        self.before_model: list[Callable[[nn.Module], None]] = []
        self._leave = leave
        self._stepped_at: float | None = None
        self._over = False

    # -- the run's course ------------------------------------------------------------------------

    def reach(self) -> None:
        """A forward or backward begins: what came before belongs to the last step."""
        self.close_step()
        if self.stepped >= self.trial.steps:
            self.finish("steps")

    def first_forward(self, module: nn.Module) -> None:
        """Record the model that `module` belongs to, once."""
        root = self.models.enter(module)
        if root is None:
            return
        for act in self.before_model:
            act(root)
        self.recorder.emit("model", **dataclasses.asdict(self._model(root)))

    def without_fsdp(self) -> None:
        """No model that FSDP manages ran before the first step: say what there is instead."""
        nothing = Model(census([]), {}, {}, ())
        self.recorder.emit("model", **dataclasses.asdict(nothing))

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizers[0]:
            return
        self.stepped += 1
        now = time.perf_counter()
        if self._stepped_at is not None:
            self.step.seconds = now - self._stepped_at
        self._stepped_at = now
        self.step.peak = peak_memory(self.device)

    def close_step(self) -> None:
        """Write the step that the primary optimizer has made, if it is not written yet."""
        if self.stepped > self.emitted:
            self.recorder.emit("step", **dataclasses.asdict(self.step.close()))
            self.emitted += 1
            self.step = Open()

    @contextlib.contextmanager
    def clip(self) -> Iterator[None]:
        """While the script is in a call that clips gradients."""
        self.clipping = True
        try:
            yield
        finally:
            self.clipping = False

    def finish(self, why: str) -> NoReturn:
        if not self._over:
            self._over = True
            self.close_step()
            self.recorder.emit("final", **dataclasses.asdict(self._final()))
            self.recorder.emit(
                "end", why=why, exact_calls=self.exact_calls, exact_clips=self.exact_clips
            )
        self._leave()

    # -- what is recorded ------------------------------------------------------------------------

    def _model(self, root: nn.Module) -> Model:
        params = {piece.name: _parameter(piece) for piece in self.models.pieces_of(root)}
        return Model(
            units=census(self.models.roots),
            params=params,
            buffers={name: _buffer(b, root) for name, b in self.models.buffers(root)},
            ties=tuple(self.models.ties),
        )

    def _final(self) -> Final:
        for root in self.models.roots:
            for module in root.modules():
                if is_managed(module) and not isinstance(module, FullyShardedDataParallel):
                    module.reshard()  # type: ignore[operator]
        params = {p.name: p.part(p.value()) for p in self.models.pieces if p.count}
        buffers = {
            name: _buffer(b, root)
            for root in self.models.roots
            for name, b in self.models.buffers(root)
        }
        return Final(params, buffers, tuple(self.state_of(o) for o in self.optimizers))

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Optimizer state by parameter name: a Part for what is shaped like the parameter."""
        found: dict[str, dict[str, Any]] = {}
        for piece in self.models.pieces:
            state: Mapping[str, Any] = optimizer.state.get(piece.carrier, {})
            if state:
                found[piece.name] = {key: _state(piece, value) for key, value in state.items()}
        return found


def _parameter(piece: Piece) -> Parameter:
    return Parameter(
        shape=piece.block.shape,
        dtype=str(piece.dtype),
        requires_grad=piece.carrier.requires_grad,
        kind=piece.kind,
        layout=piece.layout,
        degrees=piece.degrees,
        reduce_dtype=str(piece.reduce_dtype),
        compute_dtype=str(piece.compute_dtype),
        extent=piece.extent,
        part=piece.part(piece.value()) if piece.count else None,
    )


def _buffer(buffer: torch.Tensor, root: nn.Module) -> dict[str, Any]:
    """FSDP1 may cast buffers at the first forward: then both forms are told."""
    known: dict[str, Any] = {"print": fingerprint.whole(_local(buffer))}
    policy = getattr(root, "mixed_precision", None)
    cast = getattr(policy, "buffer_dtype", None)
    if cast is not None and buffer.is_floating_point():
        known["cast"] = fingerprint.whole(_local(buffer).to(cast))
    return known


def _state(piece: Piece, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float | str | bool | None) else repr(type(value))
    if value.numel() == 1 and value.dim() == 0:
        return float(value)
    run = piece.run_of(value)
    if run is not None:
        return piece.part(run) if piece.count else Part(piece.extent, 0, 0, 0.0, ())
    return f"{tuple(value.shape)} {value.dtype}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def peak_memory(device: str) -> int:
    """Bytes: the allocator's peak on CUDA, the process's peak resident size on CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
