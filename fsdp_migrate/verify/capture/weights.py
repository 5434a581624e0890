"""
`--same-init`: the first run's initial weights, written by each rank and put into the second run.

Written as the runs of elements that each rank holds, read back as the runs that each rank of the
other run wants: the two need not shard alike. The random state goes along, rank by rank, because a
run that initialised its own weights has drawn other numbers by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn, serialization

from fsdp_migrate.verify.capture.fingerprint import CHUNK
from fsdp_migrate.verify.capture.pieces import local_of
from fsdp_migrate.verify.capture.session import Session


def install_keeper(session: Session, folder: Path) -> None:
    def keep(root: nn.Module) -> None:
        kept: dict[str, Any] = {}
        for piece in session.models.pieces_of(root):
            if piece.count:
                where = piece.block.positions(piece.start, piece.count, torch.device("cpu"))
                run = piece.value().detach().cpu().clone()
                kept[piece.name] = (piece.block.shape, torch.cat(list(where)), run)
        buffers = {n: local_of(b).detach().cpu().clone() for n, b in session.models.buffers(root)}
        label = len(session.models.roots)
        serialization.save(  # torch.save itself is moved to the scratch folder (`saves`)
            {"params": kept, "buffers": buffers, "random": _random(session.device)},
            folder / f"start{label}-rank{session.rank}.pt",
        )

    session.before_model.append(keep)


def install_replay(session: Session, folder: Path) -> None:
    def replay(root: nn.Module) -> None:
        label = len(session.models.roots)
        files = sorted(folder.glob(f"start{label}-rank*.pt"))
        saved = {
            file.stem.rpartition("rank")[2]: serialization.load(file, mmap=True) for file in files
        }
        if not saved:
            raise RuntimeError(f"--same-init: the first run left no weights of its model {label}")
        for piece in session.models.pieces_of(root):
            if piece.count:
                _fill(piece, list(saved.values()))
        mine = saved.get(str(session.rank))
        if mine is None:
            session.recorder.note(
                "--same-init: this rank has no counterpart; its buffers are its own"
            )
            return
        for name, buffer in session.models.buffers(root):
            if name in mine["buffers"]:
                local_of(buffer).detach().copy_(mine["buffers"][name])
        _set_random(session.device, mine["random"])

    session.before_model.append(replay)


def _fill(piece: Any, saved: list[Any]) -> None:
    """Gather one parameter from every rank's runs, then take this rank's elements of it."""
    parts = [rank["params"][piece.name] for rank in saved if piece.name in rank["params"]]
    if not parts:
        raise RuntimeError(f"--same-init: the first run has no parameter {piece.name}")
    shape = parts[0][0]
    if tuple(shape) != tuple(piece.block.shape):
        raise RuntimeError(
            f"--same-init: {piece.name} has shape {tuple(shape)} in the first run, "
            f"{tuple(piece.block.shape)} in the second"
        )
    full = torch.empty(torch.Size(shape).numel(), dtype=parts[0][2].dtype)
    for _, where, run in parts:
        full[where] = run
    target = piece.value()
    positions = piece.block.positions(piece.start, piece.count, torch.device("cpu"))
    for start, where in zip(range(0, piece.count, CHUNK), positions, strict=True):
        target[start : start + CHUNK].copy_(full[where])


def _random(device: str) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if device == "cuda" else states


def _set_random(device: str, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1])
