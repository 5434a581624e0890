"""
A YAML or JSON file as mappings whose places in the text are known.

`ruamel.yaml` says where every key and value stands; `edits.py` then changes the text there and
nowhere else. So comments, order, quotes, indentation and line ends survive by construction, which
no dump of a parsed tree can promise. JSON is read by the same parser: it is YAML in flow style.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fsdp_migrate.errors import Corrupt

NULLS = ("", "null", "~", "none")
TRUES = ("true", "yes", "on", "1")
MENTION = re.compile(
    r"fsdp|sharding_strategy|data_parallel_(type|degree)|limit_all_gathers|backward_prefetch",
    re.IGNORECASE,
)
ALIAS = re.compile(r"\s*:\s*(\*[^\s,\]}]+)")


@dataclass(frozen=True)
class Entry:
    """`key: value` as it stands in the text: offsets in characters, lines one-based."""

    key: str
    node: Node
    source: str
    key_span: tuple[int, int]
    value_span: tuple[int, int]  # empty, right behind the colon, where no value is written
    line: int

    @property
    def text(self) -> str:
        """The scalar without quotes; empty for null and for anything that is not a scalar."""
        scalar = isinstance(self.node, ScalarNode)
        return "" if not scalar or self.node.value.lower() in NULLS else str(self.node.value)

    @property
    def is_true(self) -> bool:
        return self.text.lower() in TRUES

    @property
    def items(self) -> tuple[str, ...]:
        """A list's scalars, or a string's words."""
        if isinstance(self.node, SequenceNode):
            return tuple(str(item.value) for item in self.node.value)
        return tuple(self.text.split())

    @property
    def mapping(self) -> Mapping | None:
        return Mapping(self.node, self.source) if isinstance(self.node, MappingNode) else None


@dataclass(frozen=True)
class Mapping:
    node: MappingNode
    source: str

    def __iter__(self) -> Iterator[Entry]:
        for key, value in self.node.value:
            key_end = key.end_mark.index
            yield Entry(
                key=str(key.value),
                node=value,
                source=self.source,
                key_span=(key.start_mark.index, key_end),
                value_span=self._value_span(value, key_end),
                line=key.start_mark.line + 1,
            )

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Entry | None:
        return next((entry for entry in self if entry.key == key), None)

    def text(self, key: str) -> str:
        """The scalar under `key`, empty if there is none."""
        entry = self.get(key)
        return entry.text if entry else ""

    @property
    def in_flow_style(self) -> bool:
        return bool(self.node.flow_style)

    @property
    def merges(self) -> bool:
        """Whether another mapping is merged into this one (`<<: *anchor`)."""
        return "<<" in self

    def _value_span(self, value: Node, key_end: int) -> tuple[int, int]:
        alias = ALIAS.match(self.source, key_end)
        if alias:  # the node stands where its anchor does
            return alias.span(1)
        start, end = value.start_mark.index, _end(value)
        if start < end:
            return start, end
        colon = self.source.index(":", key_end) + 1
        return colon, colon


def _end(node: Node) -> int:
    """Where the node's own text ends. A block's end mark lies past the comments that follow it."""
    if isinstance(node, MappingNode | SequenceNode) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, MappingNode) else last)
    return int(node.end_mark.index)


def parse(text: str, path: str) -> Mapping | None:
    """The document's top-level mapping, None if it is anything else. Raises Corrupt."""
    source = text
    if path.endswith(".json"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"{path}: is not JSON: {error}") from None
        if not any(MENTION.search(key) for key in _keys(value)):
            return None  # data that only speaks of it, perhaps much of it
        source = text.replace("\t", " ")  # as good a blank to JSON, not to YAML
    try:
        documents = list(YAML(pure=True).compose_all(source))
    except YAMLError as error:
        raise Corrupt(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    nodes = [node for node in documents if isinstance(node, MappingNode)]
    return Mapping(nodes[0], text) if len(documents) == len(nodes) == 1 else None


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)
