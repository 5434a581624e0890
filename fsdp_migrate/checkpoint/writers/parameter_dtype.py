"""
Which tensors `--dtype` applies to: floating parameters of the model, and nothing else.

Never optimizer state, `step`, ints or bools. Never buffers: rotary frequencies and running
statistics lose what makes them useful in 16 bits. Never 8- and 4-bit floats: their values mean
nothing without the scales beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.writers.options import CASTABLE, TargetOptions

# Last segments of names that are buffers wherever they occur; for sources that don't tell.
_BUFFER_NAMES = {
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "original_inv_freq",
    "cos_cached",
    "sin_cached",
    "freqs_cis",
    "position_ids",
    "token_type_ids",
    "attn_bias",
    "masked_bias",
    "causal_mask",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The dtype every model tensor is written as, and sentences about what that changes."""

    dtypes: Mapping[str, str]
    notes: tuple[str, ...]


def is_parameter(index: Index, name: str) -> bool:
    """
    Whether `name` is a parameter: as the source tells; else by what tells it just as well, having
    optimizer state; else by not being named as a buffer.
    """
    role = index.role(name)
    if role != "unknown":
        return role == "parameter"
    if index.optimizer is not None and name in index.optimizer.state:
        return True
    return name.rpartition(".")[2] not in _BUFFER_NAMES


def decide(index: Index, options: TargetOptions) -> Decision:
    """Apply `options.dtype` to the model."""
    keep = {name: tensor.dtype for name, tensor in index.model.items()}
    if options.dtype == "keep":
        return Decision(keep, ())
    cast: Counter[str] = Counter()
    left: dict[str, list[str]] = {}
    dtypes = {}
    for name, tensor in index.model.items():
        dtypes[name] = tensor.dtype
        if tensor.dtype == options.dtype:
            continue
        if not is_parameter(index, name):
            left.setdefault("buffers", []).append(name)
        elif tensor.dtype not in CASTABLE:
            left.setdefault(f"{tensor.dtype} parameters", []).append(name)
        else:
            cast[tensor.dtype] += 1
            dtypes[name] = options.dtype
    return Decision(dtypes, (*_cast_notes(cast, options.dtype), *_left_notes(left)))


def _cast_notes(cast: Counter[str], target: str) -> list[str]:
    if not cast:
        return [f"no parameter had to be cast to {target}"]
    return [
        f"{count} parameter{'s' * (count > 1)} cast from {source} to {target}"
        for source, count in cast.items()
    ]


def _left_notes(left: Mapping[str, list[str]]) -> list[str]:
    return [
        f"not cast: {len(names)} {kind} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        for kind, names in left.items()
    ]
