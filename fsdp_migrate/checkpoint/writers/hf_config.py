"""
The files beside the weights: carried as they are, `config.json`'s dtype made to agree.

transformers builds the model in the dtype that config.json names (`torch_dtype`, since 5.0
`dtype`), whatever the weights are in; a config that disagrees would cast them again on loading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp_migrate.checkpoint.plan import Carried, Literal, OutputFile
from fsdp_migrate.checkpoint.writers.options import TargetOptions
from fsdp_migrate.errors import Corrupt

CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class Sidecars:
    files: tuple[OutputFile, ...]
    carried: tuple[Carried, ...]
    notes: tuple[str, ...]


def config_of(options: TargetOptions) -> Mapping[str, Any] | None:
    """The model's config.json: as given, else as it lies among the sidecars."""
    if options.hf_config is not None:
        return options.hf_config
    source = _config_file(options)
    if source is None:
        return None
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Corrupt(f"{source}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise Corrupt(f"{source}: expected an object, found {type(config).__name__}")
    return config


def with_dtype(options: TargetOptions, floating: set[str]) -> Sidecars:
    """Everything beside the weights, whose floating parameters are of the dtypes `floating`."""
    config = config_of(options)
    source = _config_file(options)
    carried = [path for path in options.sidecars if path != source]
    if config is None:
        return Sidecars((), _carry(carried), ("no config.json: transformers needs one to load",))
    if len(floating) != 1:
        kinds = ", ".join(sorted(floating))
        note = f"config.json's dtype is left as it was: parameters are of several dtypes ({kinds})"
        notes = (note,) if floating else ()
        return _unchanged(config, source, carried, notes)
    (dtype,) = floating
    updated, was = _set_dtype(config, dtype)
    if updated == config:
        return _unchanged(config, source, carried, ())
    note = f"config.json: dtype {was or 'absent'} -> {dtype}, as the weights are written"
    return Sidecars((_config_json(updated),), _carry(carried), (note,))


def _unchanged(
    config: Mapping[str, Any], source: Path | None, carried: list[Path], notes: tuple[str, ...]
) -> Sidecars:
    if source is not None:
        return Sidecars((), _carry([source, *carried]), notes)
    return Sidecars((_config_json(config),), _carry(carried), notes)


def _set_dtype(config: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], str | None]:
    """
    `config` with every dtype key in it set, those of nested configs (text_config) too, but not
    inside `quantization_config`, where they mean something else; and what the first one was.
    """
    updated = dict(config)
    was: str | None = None
    for key in _DTYPE_KEYS:
        if updated.get(key) is not None:
            was = was or str(updated[key])
            updated[key] = dtype
    for key, value in config.items():
        if not key.endswith("_config") or key == "quantization_config":
            continue
        if isinstance(value, dict) and any(value.get(name) is not None for name in _DTYPE_KEYS):
            updated[key], inner = _set_dtype(value, dtype)
            was = was or inner
    if was is None:
        updated["torch_dtype"] = dtype  # the spelling that every transformers release reads
    return updated, was


def _config_file(options: TargetOptions) -> Path | None:
    return next((path for path in options.sidecars if path.name == CONFIG), None)


def _config_json(config: Mapping[str, Any]) -> OutputFile:
    data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return OutputFile(PurePosixPath(CONFIG), len(data), (Literal(0, data),))


def _carry(paths: list[Path]) -> tuple[Carried, ...]:
    return tuple(Carried(PurePosixPath(path.name), path, link=False) for path in paths)
