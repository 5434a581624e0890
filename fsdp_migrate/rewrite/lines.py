"""
The lines every node spans.

libcst's PositionProvider gives columns and accurate ranges too, at several times the cost, which
was a third of the time a file takes. Lines come from printing the module once, as it does.
"""

from __future__ import annotations

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

    def record_syntactic_position(self, node: cst.CSTNode, **_ends: Any) -> Any:
        return _Span(self, node)


class _Span:
    """One node while it is printed; a generator for each would cost more than the printing."""

    __slots__ = ("node", "printer", "start")

    def __init__(self, printer: _Printer, node: cst.CSTNode) -> None:
        self.printer, self.node, self.start = printer, node, printer.line

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None:
        provider: Any = self.printer.provider
        provider[id(self.node)] = (self.start, self.printer.line)


def lines_of(module: cst.Module) -> dict[int, tuple[int, int]]:
    """First and last line, by the id of the node; small tokens have none of their own."""
    found: dict[int, tuple[int, int]] = {}
    provider: Any = found
    module._codegen(_Printer(module.default_indent, module.default_newline, provider))
    return found
