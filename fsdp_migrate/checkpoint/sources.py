"""
Find what a path is: which files are a model, which an optimizer, and how they are read.

Recognised by content: a file by its first bytes, a folder by what is in it. With several
candidates the user is asked, never the likeliest taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fsdp_migrate.checkpoint.contents import Contents
from fsdp_migrate.checkpoint.pickles import Inert
from fsdp_migrate.checkpoint.readers import dcp, full, ranks, safetensors
from fsdp_migrate.checkpoint.sorting import Sorted, sort
from fsdp_migrate.checkpoint.torch_file import is_torch_file
from fsdp_migrate.errors import Incomplete, OpenQuestion, SourceError, UnknownFormat

_DEEPEST = 2  # folder levels below the source that are searched
# What trainers leave beside a model and never is one; not read, only listed.
_SIDECARS = re.compile(
    r"training_args\.bin|scheduler(_\d+)?\.(pt|bin)|scaler(_\d+)?\.pt|rng_state(_\d+)?\.pth|"
    r"random_states_\d+\.pkl|extra_state.*\.pt|sampler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of the source that one reader reads as a whole; `name` is what users call it."""

    name: str
    path: Path
    read: Callable[[], Contents]


@dataclass(frozen=True, slots=True)
class Part:
    """A candidate that was read."""

    candidate: Candidate
    contents: Contents
    sorted: Sorted

    @property
    def has_model(self) -> bool:
        return bool(self.sorted.model_roots)

    @property
    def has_optimizer(self) -> bool:
        return bool(self.sorted.optimizer_roots or self.sorted.raw_roots)


@dataclass(frozen=True, slots=True)
class Source:
    """
    `beside` are files that hold neither model nor optimizer (scheduler, RNG states).

    `unwanted_optimizer`: there is one, and the caller did not want it.
    """

    path: Path
    model: Part | None
    optimizer: Part | None
    beside: tuple[str, ...]
    unwanted_optimizer: bool = False


def find(path: Path, optimizer_from: Path | None = None, *, with_optimizer: bool = True) -> Source:
    """
    The model and the optimizer at `path`; the optimizer may be given apart, or not be wanted.

    Raises `UnknownFormat`, `OpenQuestion` for several candidates, and what readers raise.
    """
    parts = [_read(candidate) for candidate in candidates(path)]
    if not parts:
        raise UnknownFormat(
            f"{path}: holds no checkpoint this tool knows (DCP, files of torch.save, safetensors)"
        )
    models = [part for part in parts if part.has_model]
    optimizers: list[Part] = []
    if not with_optimizer:
        pass
    elif optimizer_from is not None:
        optimizers = [_read(c) for c in candidates(optimizer_from)]
        optimizers = [part for part in optimizers if part.has_optimizer]
        if not optimizers:
            raise UnknownFormat(f"{optimizer_from}: holds no optimizer")
    else:
        optimizers = [part for part in parts if part.has_optimizer]
    model = _one("model", models, path)
    optimizer = _one("optimizer", optimizers, optimizer_from or path)
    if model is None and optimizer is None:
        raise UnknownFormat(
            f"{path}: holds no model"
            + (" and no optimizer" if with_optimizer else "")
            + (_WHOLE_MODULE if any(_is_object(part) for part in parts) else "")
        )
    used = [id(part) for part in (model, optimizer) if part is not None]
    unwanted = not with_optimizer and any(part.has_optimizer for part in parts)
    beside = [
        part.candidate.name
        for part in parts
        if id(part) not in used and not (unwanted and part.has_optimizer)
    ]
    if path.is_dir():
        beside += [file.name for file in _files(path) if _SIDECARS.fullmatch(file.name)]
    return Source(path, model, optimizer, tuple(beside), unwanted)


_WHOLE_MODULE = (
    "; it is a pickled object, as torch.save(model) writes. Its class is never run here: load it "
    "where its code is, and save model.state_dict()"
)


def _is_object(part: Part) -> bool:
    return isinstance(part.contents.values.get(()), Inert)


def _read(candidate: Candidate) -> Part:
    contents = candidate.read()
    return Part(candidate, contents, sort(contents))


def _one(kind: str, parts: list[Part], path: Path) -> Part | None:
    if len(parts) > 1:
        names = "\n".join(f"  {part.candidate.path}" for part in parts)
        raise OpenQuestion(
            f"{path} holds more than one {kind}; give the one to convert as SOURCE"
            + (" or --optimizer" if kind == "optimizer" else "")
            + f":\n{names}"
        )
    return parts[0] if parts else None


def candidates(path: Path) -> list[Candidate]:
    try:
        if path.is_file():
            return [_file(path)]
        if path.is_dir():
            return list(_folder(path, 0))
        there = path.exists()
    except OSError as error:
        raise SourceError(f"{error.filename or path}: {error.strerror}") from None
    raise SourceError(f"{path}: {'neither a file nor a' if there else 'no such file or'} folder")


def _file(path: Path) -> Candidate:
    if path.name == dcp.METADATA:
        return Candidate(path.parent.name, path.parent, partial(dcp.read, path.parent))
    if path.name.endswith(".safetensors"):
        return Candidate(path.name, path, partial(safetensors.read, [path]))
    if path.suffix == ".distcp":
        raise SourceError(f"{path}: one file of a distributed checkpoint; give its folder")
    if path.name.endswith(".index.json"):
        return next(iter(_hugging_face(path.parent, [path])))
    if is_torch_file(path):
        for rank_set in ranks.rank_sets(_files(path.parent)):
            if path in (file for _, file in rank_set.files) and len(rank_set.files) > 1:
                return Candidate(rank_set.template, path, partial(ranks.read, rank_set))
        return Candidate(path.name, path, partial(full.read, [path]))
    raise UnknownFormat(f"{path}: neither a file of torch.save nor safetensors")


def _folder(path: Path, depth: int) -> Iterable[Candidate]:
    files = _files(path)
    if any(file.name == dcp.METADATA or file.suffix == ".distcp" for file in files):
        yield Candidate(path.name, path, partial(dcp.read, path))
        return
    yield from _hugging_face(path, files)
    in_index = {file for file in files if file.name.endswith(".bin") and "-of-" in file.name}
    torch_files = [
        file
        for file in files
        if file not in in_index and not _SIDECARS.fullmatch(file.name) and is_torch_file(file)
    ]
    sets = ranks.rank_sets(torch_files)
    _check_worlds(path, sets)
    taken: set[Path] = set()
    for rank_set in sets:
        taken.update(file for _, file in rank_set.files)
        yield Candidate(
            rank_set.template,
            path / rank_set.template,
            partial(ranks.read, rank_set),
        )
    for file in torch_files:
        if file not in taken:
            yield Candidate(file.name, file, partial(full.read, [file]))
    if depth < _DEEPEST:
        for folder in sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] != "."):
            yield from _folder(folder, depth + 1)


def _hugging_face(path: Path, files: list[Path]) -> Iterable[Candidate]:
    """Sets with an index first; then each safetensors file that no index lists."""
    listed: set[str] = set()
    for index in (file for file in files if file.name.endswith(".index.json")):
        names = _weight_files(index)
        listed.update(names)
        members = [path / name for name in sorted(names)]
        missing = [file.name for file in members if not file.is_file()]
        if missing:
            raise Incomplete(f"{path}: {index.name} lists {', '.join(missing)}, which is missing")
        if index.name.endswith(".safetensors.index.json"):
            yield Candidate(
                index.name,
                path,
                partial(safetensors.read, members, index),
            )
        else:
            yield Candidate(index.name, path, partial(full.read, members))
    alone = [f for f in files if f.name.endswith(".safetensors") and f.name not in listed]
    sharded = [file for file in alone if file.name.startswith("shard-")]
    if sharded:
        yield Candidate("shard-*.safetensors", path, partial(safetensors.read, sharded))
    for file in alone:
        if file not in sharded:
            yield Candidate(file.name, file, partial(safetensors.read, [file]))


def _weight_files(index: Path) -> set[str]:
    import json

    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise SourceError(f"{index}: not an index of weight files ({error})") from None
    for name in names:
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise SourceError(f"{index}: refers to {name!r}, outside of its folder")
    return names


def _check_worlds(path: Path, sets: list[ranks.RankSet]) -> None:
    """Two jobs of different size saved into one folder: which is meant, nobody can tell."""
    worlds: dict[str, set[int]] = {}
    for rank_set in sets:
        if rank_set.named_world_size is not None:
            kind = rank_set.template.replace(str(rank_set.named_world_size), "#")
            worlds.setdefault(kind, set()).add(rank_set.named_world_size)
    for kind, found in worlds.items():
        if len(found) > 1:
            sizes = " and ".join(map(str, sorted(found)))
            raise Incomplete(
                f"{path}: holds rank files of world sizes {sizes} ({kind}); move those of the "
                "other job away"
            )


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file())
