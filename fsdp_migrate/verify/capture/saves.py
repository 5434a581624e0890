"""
What a script writes stays away from the user's files.

The script runs in a scratch folder that shows the entries of the folder it was started from, so
relative reads work and relative writes land in the scratch. Saves to any other path are moved into
the scratch too, and a load of such a path finds what was saved there. Trackers go offline.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

from fsdp_migrate.verify.capture.session import Session

TRACKERS = {
    "WANDB_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "DVCLIVE_TEST": "1",
    "SWANLAB_MODE": "disabled",
    "TRACKIO_DISABLED": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def enter_scratch(scratch: Path) -> None:
    """Work in `scratch`, which shows the entries of the present folder."""
    for entry in Path.cwd().iterdir():
        link = scratch / entry.name
        if not link.is_symlink() and not link.exists() and entry.resolve() != scratch.resolve():
            try:
                link.symlink_to(entry.resolve())
            except FileExistsError:
                continue  # another rank was faster
    os.chdir(scratch)
    for name, value in TRACKERS.items():
        os.environ.setdefault(name, value)
    os.environ["WANDB_DIR"] = str(scratch)
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{scratch / 'mlruns'}"


def install(session: Session, scratch: Path) -> None:
    moved = _Moved(session, scratch)
    _with_path(torch, "save", ("f", 1), moved.write)
    _with_path(torch, "load", ("f", 0), moved.read)
    for name in ("save", "async_save", "save_state_dict"):
        _with_path(dcp, name, ("checkpoint_id", None), moved.write)
    for name in ("load", "load_state_dict"):
        _with_path(dcp, name, ("checkpoint_id", None), moved.read)
    _with_path(filesystem.FileSystemWriter, "__init__", ("path", 1), moved.write)
    _with_path(filesystem.FileSystemReader, "__init__", ("path", 1), moved.read)


class _Moved:
    def __init__(self, session: Session, scratch: Path) -> None:
        self._session = session
        self._scratch = scratch.resolve()

    def write(self, path: Path) -> Path:
        full = path.resolve()
        if full.is_relative_to(self._scratch):
            return path
        target = self._place(full)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._session.recorder.note(f"what the script saves goes to {self._scratch}")
        return target

    def read(self, path: Path) -> Path:
        moved = self._place(path.resolve())
        return moved if moved.exists() else path

    def _place(self, full: Path) -> Path:
        return self._scratch / "saved" / str(full).lstrip("/")


def _with_path(owner: Any, name: str, where: tuple[str, Any], move: Any) -> None:
    """Let `move` choose the path that `owner.name` is given under this keyword or position."""
    if (original := getattr(owner, name, None)) is None:
        return
    keyword, position = where

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[position : position + 1] if position is not None else ()
        if isinstance(path := kwargs.get(keyword), str | os.PathLike):
            kwargs[keyword] = move(Path(path))
        elif given and isinstance(given[0], str | os.PathLike):
            args = (*args[:position], move(Path(given[0])), *args[position + 1 :])
        return original(*args, **kwargs)

    setattr(owner, name, call)
