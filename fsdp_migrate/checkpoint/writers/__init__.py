"""
The formats that can be written, one module each.

A writer turns an Index into a Plan: pure, without torch, without reading a tensor's bytes. A new
target is a module here and an entry in WRITERS.
"""

from __future__ import annotations

from typing import Protocol

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.plan import Plan
from fsdp_migrate.checkpoint.writers import dcp, fsdp2, hf, torch
from fsdp_migrate.checkpoint.writers.options import TargetOptions


class Writer(Protocol):
    @property
    def NAME(self) -> str:  # noqa: N802
        """What `--to` calls it."""

    def plan(self, index: Index, options: TargetOptions) -> Plan: ...


WRITERS: tuple[Writer, ...] = (dcp, fsdp2, hf, torch)

__all__ = ["WRITERS", "TargetOptions", "Writer"]
