"""
What the text of a model's file gives away, without parsing it.

Model definitions mostly live in files that never name FSDP; parsing all of them would cost more
than the whole rewriting.
"""

from __future__ import annotations

import re
import sys

_BUFFERS = re.compile(r"register_buffer|BatchNorm|InstanceNorm|\bBuffer\(|SpectralNorm|weight_norm")
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([A-Za-z_]\w*)", re.MULTILINE)
_CLASS = re.compile(r"^class\s+(\w+)", re.MULTILINE)
_FORWARD = re.compile(r"def forward\(\s*self\s*,?([^)]*)\)")
# Where no model comes from: a file that imports only these defines its own, or gets it passed.
_NO_MODELS = frozenset(sys.stdlib_module_names) | {
    "torch",
    "numpy",
    "tqdm",
    "wandb",
    "tensorboard",
    "yaml",
    "omegaconf",
    "hydra",
    "datasets",
    "einops",
    "fire",
    "psutil",
    "pkg_resources",
    "packaging",
    "rich",
    "safetensors",
    "sentencepiece",
    "tiktoken",
    "pandas",
    "matplotlib",
    "absl",
}


def holds_buffers(text: str) -> bool:
    """Whether a file defines modules with buffers."""
    return _BUFFERS.search(text) is not None


def model_homes(text: str) -> frozenset[str]:
    """The packages and modules a file imports that models may come from."""
    return frozenset(_IMPORT.findall(text)) - _NO_MODELS


def forward_inputs(text: str) -> dict[str, int]:
    """The number of inputs (beside self) of the `forward` of each class."""
    if "def forward(" not in text:
        return {}
    found = {}
    starts = [*_CLASS.finditer(text)]
    ends = [*(one.start() for one in starts[1:]), len(text)]
    for one, end in zip(starts, ends, strict=True):
        forward = _FORWARD.search(text, one.end(), end)
        if forward is not None:
            inputs = [part for part in forward.group(1).split(",") if part.strip()]
            found[one.group(1)] = len(inputs)
    return found
