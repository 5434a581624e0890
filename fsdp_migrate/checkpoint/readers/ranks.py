"""
Rank files: one torch.save file a rank, with ShardedTensors, DTensors, flat parameters or plain
tensors. The rank is a number in the file's name; any naming will do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.checkpoint.assemble import RankFile, assemble
from fsdp_migrate.checkpoint.contents import Contents
from fsdp_migrate.checkpoint.torch_file import read_torch_file
from fsdp_migrate.errors import Incomplete

_NUMBER = re.compile(r"\d+")
_PART_OF_SET = re.compile(r"\d+-of-\d+")
_WORLD = re.compile(r"(?:world_?size|ws)[_-]?(\d+)", re.IGNORECASE)
_RANK_WORD = re.compile(r"rank[_.-]?$|^r$|[_.-]r$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RankSet:
    """Files alike but for the rank in their names, in rank order."""

    template: str
    files: tuple[tuple[int, Path], ...]

    @property
    def named_world_size(self) -> int | None:
        """The world size that the names themselves give."""
        match = _WORLD.search(self.template)
        return int(match[1]) if match else None


def rank_sets(files: Iterable[Path]) -> list[RankSet]:
    """The sets of rank files among `files`; what fits no set is left out."""
    places: dict[str, dict[int, Path]] = {}
    spoken: set[str] = set()
    for file in files:
        if _PART_OF_SET.search(file.name):
            continue
        for match in _NUMBER.finditer(file.name):
            before, after = file.name[: match.start()], file.name[match.end() :]
            template = f"{before}*{after}"
            if _is_world(file.name, match.start()):
                continue
            places.setdefault(template, {})[int(match[0])] = file
            if _RANK_WORD.search(before):
                spoken.add(template)
    sets: list[RankSet] = []
    taken: set[Path] = set()
    # A template that says "rank" wins over one whose varying number may be anything.
    order = sorted(places, key=lambda template: (template not in spoken, template))
    for template in order:
        found = {rank: file for rank, file in places[template].items() if file not in taken}
        if template in spoken or (len(found) > 1 and set(found) == set(range(len(found)))):
            sets.append(RankSet(template, tuple(sorted(found.items()))))
            taken.update(found.values())
    return sets


def _is_world(name: str, start: int) -> bool:
    """Whether the number at `start` is the one behind "world_size"."""
    return any(match.start(1) == start for match in _WORLD.finditer(name))


def read(rank_set: RankSet) -> Contents:
    """The assembled contents; `Incomplete` names the ranks whose files are missing."""
    ranks = [rank for rank, _ in rank_set.files]
    folder = rank_set.files[0][1].parent
    world = rank_set.named_world_size
    expected = range(world if world is not None else max(ranks) + 1)
    missing = sorted(set(expected) - set(ranks))
    if missing or max(ranks) >= len(expected):
        raise Incomplete(
            f"{folder}: {rank_set.template} should be there for ranks 0 to {len(expected) - 1}; "
            f"missing: {missing}, found: {ranks}"
        )
    files = (RankFile(rank, read_torch_file(path)) for rank, path in rank_set.files)
    return assemble(files, "one torch.save file a rank")
