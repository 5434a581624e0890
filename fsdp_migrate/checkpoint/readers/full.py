"""
FULL_STATE_DICT: one file of torch.save with whole tensors, nested at any depth.

Also a Hugging Face `pytorch_model.bin.index.json` set, whose files have disjoint names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_migrate.checkpoint.assemble import RankFile, assemble
from fsdp_migrate.checkpoint.contents import Contents, shown
from fsdp_migrate.checkpoint.torch_file import read_torch_file
from fsdp_migrate.errors import Incomplete


def read(files: Sequence[Path]) -> Contents:
    """One file, or several whose names do not meet."""
    first, *others = [
        assemble([RankFile(0, read_torch_file(file))], "torch.save file") for file in files
    ]
    for other in others:
        twice = next((path for path in other.values if path in first.values), None)
        if twice is not None:
            raise Incomplete(f"{files[0].parent}: {shown(twice)} is in two of its files")
        first = replace(
            first,
            values={**first.values, **other.values},
            roles={**first.roles, **other.roles},
        )
    return first
