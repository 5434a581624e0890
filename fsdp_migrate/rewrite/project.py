"""What the files of a run know of one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Project:
    """
    `packages` gives a file's dotted package; `origins` maps a name that some file of the run
    re-exports to where it comes from; `exports` the names that others import from a file.
    """

    sets_device: bool = False
    has_fsdp: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    exports: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def package(self, path: str) -> str:
        return self.packages.get(path, "")

    def origin(self, qualified: str) -> str:
        return self.origins.get(qualified, qualified)

    def exported(self, path: str) -> frozenset[str]:
        return self.exports.get(path, frozenset())
