"""
A whole checkpoint, sorted out: model, optimizer, and the small objects beside them.

This is what every reader ends in and every writer begins with; steps in between (un-flattening,
renaming, selecting) take one Index and give another. No byte of a tensor is read to build it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from fsdp_migrate.checkpoint.tensors import Tensor

Role: TypeAlias = Literal["parameter", "buffer", "unknown"]

StateValue: TypeAlias = object  # a Tensor, or a plain Python value such as an int step


@dataclass(frozen=True, slots=True)
class Group:
    """One optimizer param group: FQNs in order, and every other key as saved (lr, betas, ...)."""

    params: tuple[str, ...]
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """
    Optimizer state by FQN.

    `state[fqn]` maps state names (`step`, `exp_avg`, ...) to Tensors or plain values. Groups keep
    their order and split, empty ones included.
    """

    state: Mapping[str, Mapping[str, StateValue]]
    groups: tuple[Group, ...]

    def tensors(self) -> list[Tensor]:
        return [
            value
            for entries in self.state.values()
            for value in entries.values()
            if isinstance(value, Tensor)
        ]


@dataclass(frozen=True, slots=True)
class Index:
    """
    `model` maps FQNs to Tensors in the source's order; `roles` says which are parameters and
    which buffers, as far as the source tells. Two names over the same pieces are tied.

    `extras` are values beside model and optimizer (scheduler, step counts) by the keys that lead to
    them: Tensors, or what is made of dicts, lists, tuples, strings, numbers, bytes and None.
    `notes` are sentences for the user about what was found or chosen while reading.
    """

    model: Mapping[str, Tensor]
    optimizer: Optimizer | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    extras: Mapping[tuple[Any, ...], object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def role(self, name: str) -> Role:
        return self.roles.get(name, "unknown")
