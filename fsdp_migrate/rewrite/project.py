"""
What the files of a run know of one another.

Each file gives its `Facts`; together they make a `Project`, which every file then sees. Facts
are plain data: they travel between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_migrate.rewrite import api

_DEPTH = 6


@dataclass(frozen=True, slots=True)
class Facts:
    """
    One file: its dotted module, what it imports (`imported`) and binds by import at top level
    (`bound`), and what it shows of FSDP1. `returns` holds (function, element or None) of
    functions that give a model; `passed` holds (function, position or keyword) of calls that are
    given one; `attributes` are names under which objects hold one.
    """

    path: str
    module: str
    bound: Mapping[str, str] = field(default_factory=dict)
    stars: tuple[str, ...] = ()
    imported: frozenset[str] = frozenset()
    sets_device: bool = False
    has_fsdp: bool = False
    returns: frozenset[tuple[str, int | None]] = frozenset()
    passed: frozenset[tuple[str, int | str]] = frozenset()
    attributes: frozenset[str] = frozenset()
    checkpointers: frozenset[str] = frozenset()  # functions that apply checkpointing
    wrapped: int = 0  # FSDP calls that can be rewritten
    left: tuple[str, ...] = ()  # places of those that cannot
    sticky: tuple[object, ...] = ()  # the Modes that stay set
    buffers: bool = False  # defines modules with buffers
    model_homes: frozenset[str] = frozenset()  # imported packages models may come from
    inputs: Mapping[str, int] = field(default_factory=dict)  # inputs of forward, by class
    configs: Mapping[str, object] = field(default_factory=dict)  # state dict configs, by name


@dataclass(frozen=True)
class Project:
    facts: tuple[Facts, ...] = ()

    @classmethod
    def of(cls, facts: Iterable[Facts]) -> Project:
        return cls(tuple(facts))

    def __post_init__(self) -> None:
        by_end: dict[str, list[Facts]] = {}
        for one in self.facts:
            by_end.setdefault(one.module.split(".")[-1], []).append(one)
        object.__setattr__(self, "_by_end", by_end)
        object.__setattr__(self, "_by_path", {one.path: one for one in self.facts})
        object.__setattr__(self, "_exports", self._all_exports())

    # --- names ---------------------------------------------------------------------------

    def origin(self, qualified: str, path: str) -> str:
        """Where a name comes from, followed through re-exports by files of the run."""
        for _ in range(_DEPTH):
            module, _, name = qualified.rpartition(".")
            member = ""
            found = self._module(module, path)
            if found is None and "." in module:  # `utils.FSDP.state_dict_type`
                outer, _, inner = module.rpartition(".")
                found, name, member = self._module(outer, path), inner, f".{name}"
            if found is None:
                return qualified
            onward = found.bound.get(name) or self._by_star(found, name)
            if onward is None:
                return qualified
            qualified, path = onward + member, found.path
        return qualified

    @staticmethod
    def _by_star(found: Facts, name: str) -> str | None:
        return next((f"{star}.{name}" for star in found.stars if api.find(f"{star}.{name}")), None)

    def exported(self, path: str) -> frozenset[str]:
        """The names that other files of the run import from this one."""
        exports: dict[str, frozenset[str]] = self._exports  # type: ignore[attr-defined]
        return exports.get(path, frozenset())

    def _all_exports(self) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        for one in self.facts:
            for qualified in one.imported:
                module, _, name = qualified.rpartition(".")
                target = self._module(module, one.path)
                if target is not None and target.path != one.path:
                    found.setdefault(target.path, set()).add(name)
        return {path: frozenset(names) for path, names in found.items()}

    def _module(self, name: str, path: str) -> Facts | None:
        """The file of the run that a module name means in another file; the nearest of several."""
        if not name:
            return None
        by_end: dict[str, list[Facts]] = self._by_end  # type: ignore[attr-defined]
        fitting = [
            one
            for one in by_end.get(name.split(".")[-1], ())
            if one.module == name or one.module.endswith(f".{name}")
        ]
        return max(fitting, key=lambda one: _shared(one.path, path), default=None)

    # --- FSDP1 across files --------------------------------------------------------------

    @property
    def sets_device(self) -> bool:
        return any(one.sets_device for one in self.facts)

    @property
    def has_fsdp(self) -> bool:
        return any(one.has_fsdp for one in self.facts)

    @property
    def wrapped(self) -> int:
        return sum(one.wrapped for one in self.facts)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(place for one in self.facts for place in one.left)

    def returns_model(self, function: str, index: int | None) -> bool:
        return any((function, index) in one.returns for one in self.facts)

    def takes_model(self, function: str, position: int | None, name: str) -> bool:
        return any(
            (function, position) in one.passed or (function, name) in one.passed
            for one in self.facts
        )

    def holds_model(self, attribute: str) -> bool:
        return any(attribute in one.attributes for one in self.facts)

    def checkpoints(self, function: str) -> bool:
        return any(function in one.checkpointers for one in self.facts)

    @property
    def holds_buffers(self) -> bool:
        return any(one.buffers for one in self.facts)

    @property
    def model_homes(self) -> frozenset[str]:
        return frozenset().union(*(one.model_homes for one in self.facts))

    def holds(self, package: str) -> bool:
        """Whether a top-level name is a module or package of the run itself."""
        return any(f".{package}." in f".{one.module}." for one in self.facts)

    def inputs_of(self, block: str) -> int:
        return max((one.inputs.get(block, 0) for one in self.facts), default=0)

    def sticky_modes(self) -> list[object]:
        found: list[object] = []
        for one in self.facts:
            found += [mode for mode in one.sticky if mode not in found]
        return found

    def config(self, qualified: str, path: str) -> object | None:
        """The state dict config that a name of another file holds."""
        module, _, name = qualified.rpartition(".")
        found = self._module(module, path)
        if found is None:
            return None
        if name in found.configs:
            return found.configs[name]
        onward = found.bound.get(name)
        return self.config(onward, found.path) if onward and onward != qualified else None


def module_of(path: Path) -> str:
    """A file's dotted name from the root of the file system: any import of it is an end of this."""
    parts = list(path.resolve().with_suffix("").parts[1:])
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def package_of(path: Path) -> str:
    module = module_of(path)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _shared(one: str, other: str) -> int:
    """How many leading path parts two files share."""
    pairs = zip(Path(one).parts, Path(other).parts, strict=False)
    return next((n for n, (left, right) in enumerate(pairs) if left != right), 99)
