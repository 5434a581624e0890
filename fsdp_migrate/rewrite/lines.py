"""
The lines every node spans.

libcst's PositionProvider gives columns and accurate ranges too, at several times the cost, which
was a third of the time a file takes. Lines come from printing the module once, as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import libcst as cst
from libcst.metadata.position_provider import PositionProvidingCodegenState


class _Printer(PositionProvidingCodegenState):
    """Counts lines while libcst prints; nothing is kept but the lines of each node."""

    def before_codegen(self, node: cst.CSTNode) -> None: ...

    def after_codegen(self, node: cst.CSTNode) -> None: ...

    def add_indent_tokens(self) -> None: ...

    def add_token(self, value: str) -> None:
        if "\n" in value or "\r" in value:
            self.line += len(value.splitlines()) - (not value.endswith(("\n", "\r")))

    @contextmanager
    def record_syntactic_position(self, node: cst.CSTNode, **_ends: Any) -> Iterator[None]:
        start = self.line
        yield
        self.provider[id(node)] = (start, self.line)  # type: ignore[index]


def lines_of(module: cst.Module) -> dict[int, tuple[int, int]]:
    """First and last line, by the id of the node; small tokens have none of their own."""
    found: dict[int, tuple[int, int]] = {}
    provider: Any = found
    module._codegen(_Printer(module.default_indent, module.default_newline, provider))
    return found
