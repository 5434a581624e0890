"""
What the user asked of a target.

One set of options for all targets; each writer refuses the ones that mean nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fsdp_migrate.errors import UsageError

KeyStyle: TypeAlias = Literal["plain", "accelerate", "torchtitan"]

KEY_STYLES: tuple[KeyStyle, ...] = ("plain", "accelerate", "torchtitan")
CASTABLE = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """
    `dtype`: what floating parameters are written as ("keep", or a name of CASTABLE); nothing else
    is ever cast.
    `ranks`: world size to cut for. `mesh`: (replicas, shards) of HSDP; their product is `ranks`.
    `keys`: how a DCP directory names things. `target_torch`: the version that will read the output;
    None is the one installed.
    `device_type`, `mesh_dim_names`: of the DeviceMesh in fsdp2 files; None for the usual ones.
    `max_shard_size`: bytes a safetensors file may have.
    `sidecars`: source files to carry along (config, tokenizer); `hf_config`: config.json parsed.
    `proven_equal`: pairs of names whose bytes someone has compared and found equal.
    `copy`: never hard-link a source file.
    Raises `UsageError` for values that contradict one another.
    """

    dtype: str = "keep"
    ranks: int | None = None
    mesh: tuple[int, int] | None = None
    keys: KeyStyle = "plain"
    target_torch: str | None = None
    device_type: str | None = None
    mesh_dim_names: tuple[str, ...] | None = None
    max_shard_size: int = 5 * 10**9
    sidecars: tuple[Path, ...] = ()
    hf_config: Mapping[str, Any] | None = None
    proven_equal: frozenset[frozenset[str]] = field(default_factory=frozenset)
    copy: bool = False

    def __post_init__(self) -> None:
        if self.dtype != "keep" and self.dtype not in CASTABLE:
            known = " or ".join(("keep", *CASTABLE))
            raise UsageError(f"cannot write parameters as {self.dtype!r}; choose {known}")
        if self.keys not in KEY_STYLES:
            raise UsageError(f"unknown key style {self.keys!r}; choose {' or '.join(KEY_STYLES)}")
        if self.ranks is not None and self.ranks < 1:
            raise UsageError(f"{self.ranks} ranks: there must be at least one")
        if self.mesh is not None and min(self.mesh) < 1:
            raise UsageError(f"mesh {'x'.join(map(str, self.mesh))}: every side must be at least 1")
        if self.mesh is not None and self.ranks not in (None, math.prod(self.mesh)):
            raise UsageError(
                f"mesh {'x'.join(map(str, self.mesh))} has {math.prod(self.mesh)} ranks, not "
                f"{self.ranks}"
            )
        if self.max_shard_size < 1:
            raise UsageError("the largest shard size must be at least one byte")

    def only(self, target: str, *used: str) -> None:
        """Raise `UsageError` if an option is given that means nothing for `target`."""
        for name in ("ranks", "mesh", "keys", "device_type", "mesh_dim_names"):
            default = "plain" if name == "keys" else None
            if name not in used and getattr(self, name) != default:
                flag = {"mesh_dim_names": "mesh-names"}.get(name, name.replace("_", "-"))
                raise UsageError(f"--{flag} means nothing for --to {target}")

    @property
    def world_size(self) -> int | None:
        return math.prod(self.mesh) if self.mesh is not None else self.ranks

    @property
    def shards(self) -> int | None:
        """Over how many ranks a parameter is cut: the inner side of a mesh, else all ranks."""
        return self.mesh[1] if self.mesh is not None else self.ranks
