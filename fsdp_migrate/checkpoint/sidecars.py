"""
The files of a Hugging Face model folder that are no weights: config, generation config, tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_migrate.errors import SourceError

_NAMES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
}


def hf_files(
    source: Path, hf_config: Path | None
) -> tuple[tuple[Path, ...], dict[str, Any] | None]:
    """
    The files to carry into a Hugging Face folder, and the parsed config.json.

    From `hf_config` where given, else from the source's folder or its `huggingface/` (verl).
    Raises `SourceError` where `hf_config` has no config.json or it cannot be parsed.
    """
    if hf_config is not None:
        folder = hf_config if hf_config.is_dir() else hf_config.parent
        if not (folder / "config.json").is_file():
            raise SourceError(f"--hf-config {hf_config}: there is no config.json")
        return _of(folder)
    here = source if source.is_dir() else source.parent
    for folder in (here, here / "huggingface"):
        if (folder / "config.json").is_file():
            return _of(folder)
    return (), None


def _of(folder: Path) -> tuple[tuple[Path, ...], dict[str, Any]]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise SourceError(f"{path}: should be a JSON object")
    return tuple(_carried(folder)), config


def _carried(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        # Custom modelling code (`auto_map` in config.json) is needed to load the model again.
        if path.is_file() and (path.name in _NAMES or path.suffix == ".py"):
            yield path
