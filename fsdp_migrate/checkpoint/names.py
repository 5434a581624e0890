"""
Clean fully qualified names (FQNs): wrappers leave segments in them, users want others.

Wrapper segments are removed as whole dotted segments wherever they stand. `module.` is a name a
model may really have, so it goes only where every name begins with it. Two names that meet are an
error. The same renaming is applied to parameters, optimizer state and param groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_migrate.checkpoint.index import Group, Index, Optimizer
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Incomplete, UsageError

Rename: TypeAlias = Callable[[str], str]

WRAPPERS = {
    "_fsdp_wrapped_module": "FSDP1",
    "_fpw_module": "FSDP1 of torch 1.13 and fairscale",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
}


@dataclass(frozen=True, slots=True)
class NameOptions:
    """
    What the user asked of names, in this order: `strip_prefix` off every name, `renames` (pattern,
    replacement) in turn, then only names that begin with one of `select` are kept.
    """

    strip_prefix: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    select: tuple[str, ...] = ()


def clean(name: str) -> str:
    """`name` without wrapper segments."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def cleaned(names: Iterable[str]) -> dict[str, str]:
    """Each name with its clean form; a leading `module.` goes if all of them have it."""
    plain = {name: clean(name) for name in names}
    while plain and all(new.startswith("module.") and len(new) > 7 for new in plain.values()):
        plain = {old: new.removeprefix("module.") for old, new in plain.items()}
    return plain


def parse_rename(text: str) -> tuple[str, str]:
    """`REGEX=REPL` from the command line; the first `=` that is not escaped divides."""
    pattern, found, replacement = re.sub(r"\\=", "\0", text).partition("=")
    pattern, replacement = pattern.replace("\0", "="), replacement.replace("\0", "=")
    if not found or not pattern:
        raise UsageError(f"--rename {text!r}: should be REGEX=REPLACEMENT")
    try:
        compiled = re.compile(pattern)
        # A group that the pattern does not have shows only when the replacement is used.
        re.compile(f"(?:{pattern})|").sub(replacement, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r}: {error}") from None
    return compiled.pattern, replacement


def rename(index: Index, options: NameOptions) -> Index:
    """
    The index under its new names.

    Raises `Incomplete` where two names meet, `UsageError` where an option fits nothing.
    """
    optimizer = index.optimizer
    every = [*index.model, *(_optimizer_names(optimizer) if optimizer else ())]
    new = {name: _renamed(name, options) for name in dict.fromkeys(every)}
    if options.strip_prefix and every:
        bare = next((n for n in every if not n.startswith(options.strip_prefix)), None)
        if bare is not None:
            raise UsageError(
                f"--strip-prefix {options.strip_prefix!r}: {bare} does not begin with it; use "
                "--select to keep only what does, or --rename"
            )
    _check_met(new)
    keep = {name for name, to in new.items() if _selected(to, options.select)}
    if options.select and not keep:
        raise UsageError(f"--select {' '.join(options.select)}: no name begins with that")
    return Index(
        model={new[n]: _named(t, new[n]) for n, t in index.model.items() if n in keep},
        optimizer=_rename_optimizer(optimizer, new, keep) if optimizer else None,
        roles={new[name]: role for name, role in index.roles.items() if name in keep},
        extras=index.extras,
        notes=index.notes,
    )


def _renamed(name: str, options: NameOptions) -> str:
    name = name.removeprefix(options.strip_prefix)
    for pattern, replacement in options.renames:
        name = re.sub(pattern, replacement, name)
    if not name:
        raise UsageError("a name would become empty")
    return name


def _selected(name: str, prefixes: Sequence[str]) -> bool:
    return not prefixes or any(name.startswith(prefix) for prefix in prefixes)


def _optimizer_names(optimizer: Optimizer) -> list[str]:
    return [*optimizer.state, *(name for group in optimizer.groups for name in group.params)]


def _check_met(new: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, name in new.items():
        if name in seen:
            raise Incomplete(f"{seen[name]} and {old} would both be called {name}")
        seen[name] = old


def _named(tensor: Tensor, name: str) -> Tensor:
    if tensor.name == name:
        return tensor
    return Tensor(name, tensor.dtype, tensor.shape, tensor.pieces, tensor.origin)


def _rename_optimizer(optimizer: Optimizer, new: Mapping[str, str], keep: set[str]) -> Optimizer:
    state = {
        new[name]: {
            key: _named(value, f"{new[name]}.{key}") if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        for name, entries in optimizer.state.items()
        if name in keep
    }
    groups = tuple(
        Group(tuple(new[name] for name in group.params if name in keep), group.options)
        for group in optimizer.groups
    )
    return Optimizer(state, groups)
