"""
What torch is installed here, found without importing it (that takes a second and 200 MB).
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fsdp_migrate.errors import UsageError


class InstalledTorch(NamedTuple):
    """`device_type` is the one it was built for: "cuda" (ROCm too), "xpu" or "cpu"."""

    version: str
    device_type: str


@cache
def installed_torch() -> InstalledTorch:
    """Read from torch/version.py; `UsageError` where there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UsageError("torch is not installed here: give --target-torch VERSION")
    source = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    values: dict[str, object] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = value.value
    device = "cuda" if values.get("cuda") or values.get("hip") else "cpu"
    if values.get("xpu"):
        device = "xpu"
    return InstalledTorch(str(values.get("__version__")), device)


def release(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"; `UsageError` for what is no version."""
    numbers = version.split("+")[0].split(".")
    if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
        raise UsageError(f"--target-torch {version}: expected a version like 2.6 or 2.13.0")
    return int(numbers[0]), int(numbers[1])
