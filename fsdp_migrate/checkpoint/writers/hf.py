"""
A Hugging Face folder: safetensors shards, their index, config and tokenizer files.

Format facts: safetensors' description (8-byte length, JSON header padded with spaces, offsets from
the header's end, no gaps); transformers' names for shards and index. Within a file tensors of the
widest elements come first, so that each begins at a multiple of its element size: readers view
them in place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import PurePosixPath

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.plan import Copy, Literal, OutputFile, Plan
from fsdp_migrate.checkpoint.writers.hf_config import with_dtype
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.checkpoint.writers.parameter_dtype import decide, is_parameter
from fsdp_migrate.checkpoint.writers.ties import aliases_to_leave_out
from fsdp_migrate.checkpoint.writers.torch import extras_note
from fsdp_migrate.errors import Unsupported, UsageError

NAME = "hf"

_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}  # loaders of other frameworks' tensors refuse a file without it


def plan(index: Index, options: TargetOptions) -> Plan:
    """
    Lay out the folder. `Unsupported` for a dtype that safetensors cannot name, `UsageError` where
    a sidecar would replace a file of the model.
    """
    options.only(NAME)
    if not index.model:
        raise Unsupported("the source holds no model, and a Hugging Face folder holds nothing else")
    decision = decide(index, options)
    ties = aliases_to_leave_out(index, options)
    dtypes = {name: decision.dtypes[name] for name in index.model if name not in ties.left_out}
    for name, dtype in dtypes.items():
        if DTYPES[dtype].safetensors is None:
            raise Unsupported(f"{name}: safetensors has no name for torch.{dtype}")
    shards = _shards(index, dtypes, options.max_shard_size)
    files = [_file(index, dtypes, name, names) for name, names in shards.items()]
    if len(shards) > 1:
        files.append(_index_file(index, dtypes, shards))
    floating = {
        dtype
        for name, dtype in dtypes.items()
        if is_parameter(index, name) and DTYPES[dtype].floating
    }
    config = with_dtype(options, floating)
    _refuse_collisions(options, files)
    return Plan(
        (*files, *config.files),
        config.carried,
        notes=(
            *decision.notes,
            *ties.notes,
            *config.notes,
            *_optimizer_note(index),
            *extras_note(index.extras),
        ),
    )


def _shards(index: Index, dtypes: Mapping[str, str], limit: int) -> dict[str, list[str]]:
    """File names and the tensors in each: filled in order, a larger tensor has a file alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, dtype in dtypes.items():
        size = index.model[name].numel * DTYPES[dtype].bytes
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, 1)
    }


def _file(index: Index, dtypes: Mapping[str, str], path: str, names: list[str]) -> OutputFile:
    header: dict[str, object] = {"__metadata__": _METADATA}
    copies: list[Copy] = []
    end = 0
    for name in sorted(names, key=lambda name: -DTYPES[dtypes[name]].bytes):
        tensor, dtype = index.model[name], DTYPES[dtypes[name]]
        copy = Copy(tensor, 0, tensor.numel, end, dtype.name)
        end += copy.nbytes
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [copy.offset, end],
        }
        if copy.nbytes:
            copies.append(copy)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = [Copy(c.tensor, c.start, c.stop, start + c.offset, c.dtype) for c in copies]
    head = Literal(0, struct.pack("<Q", len(text)) + text)
    return OutputFile(PurePosixPath(path), start + end, (head, *placed))


def _index_file(
    index: Index, dtypes: Mapping[str, str], shards: Mapping[str, list[str]]
) -> OutputFile:
    total = sum(index.model[name].numel * DTYPES[dtype].bytes for name, dtype in dtypes.items())
    weight_map = {name: path for path, names in shards.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    data = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return OutputFile(PurePosixPath(_INDEX), len(data), (Literal(0, data),))


def _refuse_collisions(options: TargetOptions, files: list[OutputFile]) -> None:
    taken = {str(file.path) for file in files}
    names = [path.name for path in options.sidecars]
    for name in names:
        if name in taken or name == _INDEX or names.count(name) > 1:
            raise UsageError(f"{name} cannot be carried along: the output has a file of that name")


def _optimizer_note(index: Index) -> tuple[str, ...]:
    if index.optimizer is None:
        return ()
    count = len(index.optimizer.state)
    return (
        f"the optimizer (state for {count} parameters) is not written: a Hugging Face folder has "
        "no place for it",
    )
