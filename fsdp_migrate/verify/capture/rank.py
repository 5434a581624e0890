"""One trial on one rank: install what watches, run the script, say how it ended."""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from fsdp_migrate.verify.capture import (
    accelerate_on_cpu,
    clipping,
    collectives,
    cuda_on_cpu,
    forwards,
    fsdp1_on_cpu,
    losses,
    optimizers,
    precision,
    process_groups,
    saves,
    weights,
)
from fsdp_migrate.verify.capture.patch import Patches
from fsdp_migrate.verify.capture.recorder import Recorder
from fsdp_migrate.verify.capture.session import Session
from fsdp_migrate.verify.trial import Trial


def run_trial(trial: Trial, folder: Path, rank: int) -> NoReturn:
    recorder = Recorder(folder / f"rank{rank}.jsonl")
    device = _device(trial.device)
    session = Session(trial, rank, device, recorder, _leave)
    recorder.emit("begin", rank=rank, device=device, torch=torch.__version__)
    with contextlib.ExitStack() as modes:
        _install(session, folder, modes)
        _seed(trial.seed)
        code = _run_script(session)
    if code:
        sys.stderr.flush()
        os._exit(code)
    session.finish("script")


def _install(session: Session, folder: Path, modes: contextlib.ExitStack) -> None:
    trial, patches = session.trial, Patches()
    if session.device == "cpu":
        modes.enter_context(cuda_on_cpu.install(session.recorder, patches))
        redirect = cuda_on_cpu.Redirect(session.recorder)
        fsdp1_on_cpu.install(redirect)
        accelerate_on_cpu.install(redirect)
    if trial.fp32:
        modes.enter_context(precision.install())
    process_groups.install(patches, trial.name)
    if trial.exact or trial.nudge is not None:
        collectives.install(session, patches)
    clipping.install(session, patches)
    forwards.install(session, patches)
    patches.spread()
    losses.install(session)
    optimizers.install(session)
    if trial.start_from is not None:
        weights.install_replay(session, trial.start_from)
    if trial.keep_start:
        weights.install_keeper(session, folder)
    saves.enter_scratch(folder / "scratch")
    saves.install(session, folder / "scratch")


def _device(wanted: str) -> str:
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _seed(seed: int) -> None:
    """Equal seeds and deterministic kernels, where the script does not set its own."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")


def _run_script(session: Session) -> int:
    script = session.trial.script
    _catch_exits(session)
    sys.argv = [str(script), *session.trial.args]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        session.recorder.emit("error", text=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _catch_exits(session: Session) -> None:
    """A script may end itself with `os._exit`; its forked data loader workers do, too."""
    leave, mine = os._exit, os.getpid()

    def ends(status: int) -> NoReturn:
        if os.getpid() == mine and status == 0:
            session.finish("script")
        leave(status)

    os._exit = ends


def _leave() -> NoReturn:
    """
    Wait to be ended from outside.

    The last rank may still be in a collective that this one must stay for, and gloo's own teardown
    aborts now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()
