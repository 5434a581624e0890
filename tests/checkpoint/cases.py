"""
The real checkpoints that tests run over: <torch version>/<case> of fixtures/checkpoints.tar.xz.

They are unpacked once into the folder where pytest keeps its own temporary files, under the
archive's hash; a later run finds them there.
"""

import getpass
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.tensors import Tensor

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "checkpoints.tar.xz"


def _unpacked() -> Path:
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()[:16]
    base = Path(tempfile.gettempdir()) / f"pytest-of-{getpass.getuser()}"
    folder = base / f"checkpoints-{digest}"
    if not folder.exists():
        base.mkdir(mode=0o700, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=base))
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(partial, filter="data")
        try:
            partial.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to someone else")
    return folder


ROOT = _unpacked()


@dataclass(frozen=True)
class Case:
    """One checkpointed run; `parts` are the folders below it (local_rank, raw_optim, ...)."""

    path: Path

    @property
    def torch(self) -> tuple[int, int]:
        major, minor, *_ = self.path.parent.name.split(".")
        return int(major), int(minor)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def id(self) -> str:
        return f"{self.path.parent.name}-{self.name}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        return json.loads((self.path / "case.json").read_text())["cfg"]

    @cached_property
    def truth(self) -> dict[str, Any]:
        return torch.load(self.path / "truth.pt", weights_only=True)

    def ranks(self, part: str, pattern: str) -> list[Path]:
        """The rank files of `part` in rank order; `pattern` must match the whole name."""
        found = [
            (int(match[1]), path)
            for path in (self.path / part).iterdir()
            if (match := re.fullmatch(pattern, path.name))
        ]
        return [path for _, path in sorted(found)]


def cases(part: str = "") -> Iterator[Case]:
    """Every case that has the folder `part`."""
    for case in sorted(ROOT.glob("*/*/case.json")):
        if (case.parent / part).is_dir():
            yield Case(case.parent)


def values(tensor: Tensor) -> torch.Tensor:
    """The elements of a Tensor, read from disk."""
    dtype = getattr(torch, tensor.dtype)
    with Gatherer() as gatherer:
        data = bytearray(gatherer.read(tensor))
    if not data:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not same or found.numel() == 0:
        return same
    # contiguous() would leave the odd stride of a dimension of size 1.
    whole = (t.clone(memory_format=torch.contiguous_format) for t in (found, expected))
    left, right = (t.reshape(-1).view(torch.uint8) for t in whole)
    return torch.equal(left, right)
