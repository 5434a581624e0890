"""
`convert-ckpt`: load, rename, plan, execute, prove, publish.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from fsdp_migrate.checkpoint import manifest, proof
from fsdp_migrate.checkpoint.contents import shown
from fsdp_migrate.checkpoint.execute import check_space, execute, staged
from fsdp_migrate.checkpoint.garbage import no_collection
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index, Optimizer
from fsdp_migrate.checkpoint.load import Loaded, LoadOptions, load
from fsdp_migrate.checkpoint.names import NameOptions, rename
from fsdp_migrate.checkpoint.plan import Plan
from fsdp_migrate.checkpoint.proof import Pair, SameFiles
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.writers import (
    WRITERS,
    TargetOptions,
    Writer,
    dcp,
    dcp_keys,
    dcp_link,
    fsdp2,
)
from fsdp_migrate.checkpoint.writers.ties import tied_by_config
from fsdp_migrate.errors import OpenQuestion, TargetError, UsageError

Stage: TypeAlias = Callable[[str, int], Callable[[int], None]]


def quiet(_title: str, _total: int) -> Callable[[int], None]:
    """A `Stage` that shows nothing."""
    return lambda _count: None


@dataclass(frozen=True, slots=True)
class Request:
    """One conversion as asked for on the command line."""

    source: Path
    output: Path
    to: str
    load: LoadOptions = field(default_factory=LoadOptions)
    names: NameOptions = field(default_factory=NameOptions)
    target: TargetOptions = field(default_factory=TargetOptions)
    verify: bool = True
    overwrite: bool = False
    sync: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is known before the first byte is written; what `--dry-run` shows."""

    loaded: Loaded
    index: Index
    plan: Plan
    to: str

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.index.notes, *self.plan.notes)))


@dataclass(frozen=True, slots=True)
class Proof:
    """
    `hashes`: the xxh3-128 of each written tensor by name, equal to the source's. `linked`: the
    tensors that need none, because they are the source's own bytes under a hard link.
    """

    hashes: Mapping[str, str]
    linked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Converted:
    """What was done. `proof` is None without verification."""

    prepared: Prepared
    proof: Proof | None

    @property
    def hashes(self) -> Mapping[str, str]:
        return self.proof.hashes if self.proof else {}


def writer(name: str) -> Writer:
    for candidate in WRITERS:
        if name == candidate.NAME:
            return candidate
    known = ", ".join(candidate.NAME for candidate in WRITERS)
    raise UsageError(f"--to {name}: choose one of {known}")


@no_collection()
def prepare(request: Request) -> Prepared:
    """Everything up to the plan. Reads no tensor's bytes but those that prove something."""
    chosen = writer(request.to)
    loaded = load(request.source, request.load)
    index = rename(loaded.index, request.names)
    target = request.target
    if request.to == "hf":
        target = replace(target, proven_equal=_equal_ties(index, target))
    if request.to == dcp.NAME and dcp_link.obstacle(index, target, _originals(loaded)) is None:
        return Prepared(loaded, index, dcp_link.plan(index, target), request.to)
    if request.to == fsdp2.NAME and index.optimizer is not None and not index.model:
        raise UsageError(
            "--to fsdp2 numbers the optimizer's parameters in the model's order: the source must "
            "hold the model too"
        )
    if request.to == fsdp2.NAME and index.optimizer is not None and not loaded.ordered:
        raise OpenQuestion(
            "--to fsdp2 numbers the optimizer's parameters in the model's order, and safetensors "
            "files sort their names: give --model, --hf-config or --layout"
        )
    return Prepared(loaded, index, chosen.plan(index, target), request.to)


def _originals(loaded: Loaded) -> Iterator[Tensor]:
    """The tensors as the readers gave them."""
    for part in (loaded.source.model, loaded.source.optimizer):
        if part is not None:
            yield from (tensor for _, tensor in part.contents.tensors())


def _equal_ties(index: Index, target: TargetOptions) -> frozenset[frozenset[str]]:
    """The pairs that the config ties and whose bytes are equal; others have no right answer."""
    equal = set()
    for kept, alias in tied_by_config(index, target.hf_config):
        if not _same(index.model[kept], index.model[alias]):
            raise OpenQuestion(
                f"config.json ties {alias} to {kept} (tie_word_embeddings), but their values "
                "differ: transformers would drop one of them. If they are not tied, give "
                "--hf-config a folder whose config.json says tie_word_embeddings: false"
            )
        equal.add(frozenset((kept, alias)))
    return frozenset(equal)


def convert(request: Request, stage: Stage = quiet) -> Converted:
    """Raises the errors of `fsdp_migrate.errors`; on any of them nothing is left behind."""
    prepared = prepare(request)
    plan = prepared.plan
    with staged(request.output, overwrite=request.overwrite) as staging:
        check_space(plan, staging.parent)
        execute(plan, staging, stage("writing", plan.bytes_to_write), sync=request.sync)
        proved = _prove(prepared, staging, stage, request.target.dtype) if request.verify else None
        text = manifest.dumps(
            prepared.loaded,
            prepared.index,
            request.to,
            request.target,
            proved.hashes if proved else None,
        )
        if not plan.single_file:
            (staging / manifest.NAME).write_text(text, "utf-8")
    if plan.single_file:
        manifest.beside(request.output).write_text(text, "utf-8")
    return Converted(prepared, proved)


def _prove(prepared: Prepared, staging: Path, stage: Stage, dtype: str) -> Proof:
    """Read the output with its own reader; every tensor of the source must be in it, equal."""
    index = prepared.index
    names = None
    if prepared.to == fsdp2.NAME and index.optimizer is not None:
        # Its file has numbers for names, and frozen parameters can make them ambiguous.
        names = {number: name for name, number in fsdp2.numbered(index, index.optimizer).items()}
    written = load(staging, LoadOptions(optimizer_names=names), compare_replicas=False).index
    pairs = list(_model_pairs(index, written, dtype))
    if index.optimizer is not None:
        if written.optimizer is None:
            raise TargetError("the optimizer is missing from what was written")
        pairs += _optimizer_pairs(index.optimizer, written.optimizer)
    pairs += _extra_pairs(index, written)
    # A hard link is the same file: there is nothing to compare, however many terabytes it has.
    files = SameFiles()
    linked = {pair.name for pair in pairs if files.hold(pair.source, pair.written)}
    pairs = [pair for pair in pairs if pair.name not in linked]
    total = sum(pair.source.nbytes + pair.written.nbytes for pair in pairs)
    progress = stage("verifying", total)
    hashes = proof.prove(pairs, progress)
    return Proof(hashes, tuple(sorted(linked)))


def _model_pairs(index: Index, written: Index, dtype: str) -> Iterator[Pair]:
    extra = [name for name in written.model if name not in index.model]
    if extra:
        raise TargetError(f"{extra[0]} was written, but is not in the source")
    for name, tensor in index.model.items():
        if name in written.model:
            if written.model[name].dtype not in (tensor.dtype, dtype):
                raise TargetError(f"{name} was written as {written.model[name].dtype}")
            yield Pair(name, tensor, written.model[name])
            continue
        # Left out as the alias of a tied weight: then its bytes must be there under another name.
        if not any(_same(index.model[other], tensor) for other in written.model):
            raise TargetError(f"{name} is missing from what was written")


def _extra_pairs(index: Index, written: Index) -> Iterator[Pair]:
    """What stands beside model and optimizer, where the target has a place for it."""
    # DCP takes nested values apart.
    parts = {
        leaf.path: leaf.value
        for path, value in index.extras.items()
        for leaf in dcp_keys.leaves(path, value)
    }
    for path, value in written.extras.items():
        original = index.extras.get(path, parts.get(path))
        if isinstance(value, Tensor) and isinstance(original, Tensor):
            yield Pair(shown(path), original, value)
        elif original != value:
            raise TargetError(f"{shown(path)} was not written as it is")


def _same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.pieces == other.pieces:
        return True
    with Gatherer() as gatherer:
        digests = {
            proof.digest(tensor, gatherer, tensor.dtype, lambda _: None) for tensor in (one, other)
        }
    return len(digests) == 1


def _optimizer_pairs(optimizer: Optimizer, written: Optimizer) -> Iterator[Pair]:
    if set(optimizer.state) != set(written.state):
        odd = sorted(set(optimizer.state) ^ set(written.state))[0]
        raise TargetError(f"optimizer state of {odd}: in the source or the output, not in both")
    with Gatherer() as gatherer:
        for name, entries in optimizer.state.items():
            found = written.state[name]
            if set(entries) != set(found):
                raise TargetError(f"optimizer state of {name}: {list(found)}, not {list(entries)}")
            for key, value in entries.items():
                other = found[key]
                if isinstance(value, Tensor) and isinstance(other, Tensor):
                    if value.dtype != other.dtype:
                        raise TargetError(f"{key} of {name} was written as {other.dtype}")
                    yield Pair(f"{name}.{key}", value, other)
                elif not _equal_values(value, other, gatherer):
                    raise TargetError(f"optimizer state {key} of {name} was not written as it is")
        _check_groups(optimizer, written, gatherer)


def _equal_values(value: object, other: object, gatherer: Gatherer) -> bool:
    """Plain values; a number may have become a 0-dim float32 tensor, which optimizers expect."""
    if isinstance(other, Tensor) and isinstance(value, int | float):
        if other.shape != () or other.dtype != "float32":
            return False
        (number,) = struct.unpack("<f", gatherer.read(other))
        return bool(number == value)
    return bool(value == other)


def _check_groups(optimizer: Optimizer, written: Optimizer, gatherer: Gatherer) -> None:
    """Each parameter's options must be there, under one group; new keys may have been filled in."""
    where = {name: group.options for group in written.groups for name in group.params}
    for group in optimizer.groups:
        for name in group.params:
            options = where.get(name)
            lost = [
                key
                for key, value in group.options.items()
                if options is None
                or key not in options
                or not proof.equal_options(options[key], value, gatherer)
            ]
            if options is None or lost:
                raise TargetError(f"param group of {name}: {lost or 'everything'} was not written")
