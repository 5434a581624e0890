"""
Options of param groups that the torch of today expects and a checkpoint of yesterday lacks.

`dcp.load` is strict: every option of the new optimizer must be in the checkpoint (`Missing key ...
optim.param_groups.0.decoupled_weight_decay`, pytorch#146157). The value filled in is the one that
the optimizer's own `__setstate__` gives a group without it, which is right by definition and needs
no guess between optimizers with equal options: Adam reads `decoupled_weight_decay=False`, AdamW
sets it to True itself on every load (torch 2.7 to 2.15). An option that the loading torch doesn't
know is not asked for, so one superset serves all versions.
Source: `__setstate__` of torch/optim in 2.6.0 to 2.13.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp_migrate.checkpoint.index import Optimizer

_COMMON: dict[str, object] = {"maximize": False, "foreach": None, "differentiable": False}


@dataclass(frozen=True, slots=True)
class _Kind:
    """An optimizer of torch, known by the options it has had since torch 1.x."""

    name: str
    options: frozenset[str]
    filled: Mapping[str, object]


_KINDS = (
    _Kind(
        "Adam or AdamW",
        frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad"}),
        {**_COMMON, "capturable": False, "fused": None, "decoupled_weight_decay": False},
    ),
    _Kind(
        "NAdam",
        frozenset({"lr", "betas", "eps", "weight_decay", "momentum_decay"}),
        {**_COMMON, "capturable": False, "decoupled_weight_decay": False},
    ),
    _Kind(
        "SGD",
        frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"}),
        {**_COMMON, "fused": False},
    ),
    _Kind(
        "Adagrad",
        frozenset({"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"}),
        {**_COMMON, "fused": None},
    ),
    _Kind(
        "RMSprop",
        frozenset({"lr", "momentum", "alpha", "eps", "centered", "weight_decay"}),
        {**_COMMON, "capturable": False},
    ),
    _Kind(
        "Adadelta",
        frozenset({"lr", "rho", "eps", "weight_decay"}),
        {**_COMMON, "capturable": False},
    ),
)
# Options that users and schedulers add to groups of any optimizer; they identify none.
_ANYWHERE = {
    "initial_lr",
    "name",
    "param_names",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
}


def filled(optimizer: Optimizer) -> tuple[Optimizer, tuple[str, ...]]:
    """`optimizer` with the options its kind expects, and sentences about what was added."""
    groups = []
    added: dict[str, set[str]] = {}
    unknown = False
    for group in optimizer.groups:
        kind = _kind(set(group.options))
        unknown |= kind is None
        missing = {
            key: value
            for key, value in (kind.filled if kind else {}).items()
            if key not in group.options
        }
        if missing and kind is not None:
            added.setdefault(kind.name, set()).update(missing)
        groups.append(replace(group, options={**group.options, **missing}))
    notes = [
        f"param groups of {name}: {', '.join(sorted(keys))} filled in, with the value torch gives "
        "a group that lacks it"
        for name, keys in added.items()
    ]
    if unknown:
        notes.append(
            "by its options the optimizer is not one of torch's Adam, AdamW, NAdam, SGD, Adagrad, "
            "RMSprop, Adadelta: no option was filled in; loading says which, if one is missing"
        )
    return replace(optimizer, groups=tuple(groups)), tuple(notes)


def _kind(options: set[str]) -> _Kind | None:
    """
    The one kind that has `options`. Unknown ones beside them may be another optimizer's, unless
    those are there that only torch's own have; None then.
    """
    for kind in _KINDS:
        known = kind.options | set(kind.filled) | _ANYWHERE
        if kind.options <= options and (options <= known or set(_COMMON) <= options):
            return kind
    return None
