"""
Tied word embeddings: which of the two names a Hugging Face folder leaves out.

FSDP1 writes both names of a tied weight in full. transformers wants one of them if the config ties
them, and takes both if not. So the alias is left out only where the config says they are tied and
their bytes are known to be equal: the same pieces of the same files, or a pair that the caller
compared (`TargetOptions.proven_equal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.writers.hf_config import config_of
from fsdp_migrate.checkpoint.writers.options import TargetOptions

# Module names by which transformers' models call their two ends.
_INPUTS = {
    "embed_tokens",
    "embed_in",
    "wte",
    "word_embeddings",
    "shared",
    "tok_embeddings",
    "token_embedding",
    "embeddings",
}
_OUTPUTS = {"lm_head", "embed_out", "output", "output_layer", "decoder", "lm_projection"}


@dataclass(frozen=True, slots=True)
class Ties:
    left_out: frozenset[str]
    notes: tuple[str, ...]


def tied_by_config(index: Index, config: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """
    Pairs (kept, alias) that `config` ties and the checkpoint holds both of.

    The caller compares those whose pieces differ, and names the equal ones in `proven_equal`.
    """
    if config is None or not _ties(config):
        return ()
    inputs = [name for name in index.model if _module(name) in _INPUTS]
    outputs = [name for name in index.model if _module(name) in _OUTPUTS]
    return tuple(
        (kept, alias)
        for kept in inputs
        for alias in outputs
        if index.model[kept].shape == index.model[alias].shape
        and index.model[kept].dtype == index.model[alias].dtype
    )


def same_pieces(index: Index, one: str, other: str) -> bool:
    """Whether two names are surely equal: they are stored once."""
    return index.model[one].pieces == index.model[other].pieces


def aliases_to_leave_out(index: Index, options: TargetOptions) -> Ties:
    left_out: set[str] = set()
    notes: list[str] = []
    for kept, alias in tied_by_config(index, config_of(options)):
        if alias in left_out:
            continue
        if same_pieces(index, kept, alias) or frozenset((kept, alias)) in options.proven_equal:
            left_out.add(alias)
            notes.append(f"{alias} is left out: config.json ties it to {kept}, same bytes")
        else:
            notes.append(
                f"{alias} and {kept} are both written: config.json ties them, but they are not "
                "known to be equal; transformers may keep only one of them"
            )
    return Ties(frozenset(left_out), tuple(notes))


def _ties(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, Mapping) else None
    return bool(config.get("tie_word_embeddings", inner))


def _module(name: str) -> str:
    segments = name.split(".")
    return segments[-2] if len(segments) > 1 and segments[-1] == "weight" else ""
