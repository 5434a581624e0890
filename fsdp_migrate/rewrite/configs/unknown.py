"""
FSDP settings in a file of a project not known here (composer, hydra trees, a team's own).

Nothing is changed: each place is named, so that nobody believes the file was looked after.
composer turns its `fsdp_config` into FSDP2's by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from fsdp_migrate.rewrite.configs.conversion import Conversion
from fsdp_migrate.rewrite.configs.document import Entry, Mapping

RULE = "unknown-config"
NAMES = ("fsdp", "fsdp_config", "sharding_strategy", "fsdp_sharding_strategy")
COMPOSER = ("max_duration", "eval_interval", "device_train_microbatch_size")


def recognises(_top: Mapping, _path: str) -> bool:
    return True


def convert(top: Mapping, conversion: Conversion) -> None:
    composer = any(key in top for key in COMPOSER)
    message = (
        "composer builds FSDP2's settings from these by itself; say parallelism_config.fsdp2 openly"
        if composer
        else "settings of a project not known here: not changed"
    )
    for entry in _entries(top.node, top.source):
        conversion.tell(entry, "skipped", message)


def _entries(node: Node, source: str) -> Iterator[Entry]:
    if isinstance(node, MappingNode):
        for entry in Mapping(node, source):
            if entry.key in NAMES:
                yield entry
            else:
                yield from _entries(entry.node, source)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            yield from _entries(item, source)
