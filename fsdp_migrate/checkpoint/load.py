"""
From a path to an Index: find, read, sort, un-flatten, name. No tensor's bytes are read, except
where a proof needs a few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_migrate.checkpoint import raw_dcp, raw_optimizer, replicas, sources
from fsdp_migrate.checkpoint.contents import (
    Contents,
    KeyPath,
    Replica,
    foreign_in,
    is_plain,
    shown,
)
from fsdp_migrate.checkpoint.flat import FLAT_KEYS, flats_of, unflatten
from fsdp_migrate.checkpoint.flat_layout import Evidence, Unit, writer_of
from fsdp_migrate.checkpoint.garbage import no_collection
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index, Optimizer, Role
from fsdp_migrate.checkpoint.meta_model import from_factory, from_hf_config
from fsdp_migrate.checkpoint.model_layout import ModelLayout, from_index, from_json
from fsdp_migrate.checkpoint.names import clean, cleaned
from fsdp_migrate.checkpoint.raw_dcp import is_numbered
from fsdp_migrate.checkpoint.readers import safetensors
from fsdp_migrate.checkpoint.sorting import choose, keyed_optimizer, model_values
from fsdp_migrate.checkpoint.sources import Part, Source
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.errors import Incomplete, OpenQuestion, UsageError


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """
    What the user may have to say about a source.

    `model`, `hf_config`, `layout`: where the layout of flat parameters comes from. The roots name
    one of several models or optimizers inside a file. `source_torch`: the version that wrote it,
    wanted only where the file cannot tell and it matters. `optimizer_names`: the name of each id of
    a numbered optimizer, where the caller knows them.
    """

    with_optimizer: bool = True
    optimizer_from: Path | None = None
    model_root: str | None = None
    optimizer_root: str | None = None
    model: str | None = None
    hf_config: Path | None = None
    layout: Path | None = None
    source_torch: str | None = None
    optimizer_names: Mapping[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """
    `contents` are those of the model's part, or of the optimizer's where there is no model.

    `ordered`: whether the model's tensors are in the order of its modules.
    """

    source: Source
    contents: Contents
    index: Index
    flat_units: tuple[str, ...] = ()
    layout: ModelLayout | None = None
    ordered: bool = True


@no_collection()
def load(
    path: Path,
    options: LoadOptions,
    *,
    compare_replicas: bool = True,
    for_inspection: bool = False,
) -> Loaded:
    """
    Raises the errors of `fsdp_migrate.errors`, exit codes 3 and 5.

    `for_inspection`: flat parameters and raw optimizers without a layout are shown as they are.
    """
    source = sources.find(path, options.optimizer_from, with_optimizer=options.with_optimizer)
    notes: list[str] = []
    found = _Model()
    if source.model is not None:
        found = _model(source.model, options, notes, for_inspection)
    optimizer: Optimizer | None = None
    copies: tuple[Replica, ...] = ()
    if source.optimizer is not None:
        optimizer, copies = _optimizer(source, found, options, notes, for_inspection)
        if optimizer is not None:
            _check_coverage(optimizer, found.tensors)
    elif source.unwanted_optimizer:
        notes.append("the optimizer is not converted")
    if compare_replicas:
        replicas.check(copies, {})
        for part in {id(p): p for p in (source.model, source.optimizer) if p is not None}.values():
            used = [r for r in part.contents.replicas if r.path not in part.sorted.extras]
            for name in replicas.check(used, part.contents.roles):
                notes.append(f"{name}: differs between ranks; rank 0's is taken, as FSDP does")
    if source.beside:
        notes.append(f"not converted: {', '.join(source.beside)}")
    main = source.model or source.optimizer
    assert main is not None
    parts = {id(part): part for part in (source.model, source.optimizer) if part is not None}
    extras = {
        path: value for part in parts.values() for path, value in _extras(part, notes).items()
    }
    index = Index(found.tensors, optimizer, found.roles, extras, tuple(notes))
    units = tuple(unit.prefix for unit in found.units)
    return Loaded(source, main.contents, index, units, found.layout, found.ordered)


@dataclass(frozen=True, slots=True)
class _Model:
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    units: tuple[Unit, ...] = ()
    layout: ModelLayout | None = None
    ordered: bool = True


def _model(part: Part, options: LoadOptions, notes: list[str], for_inspection: bool) -> _Model:
    roots = part.sorted.model_roots
    if options.model_root is not None:
        roots += part.sorted.other_models
    root = choose("model", roots, options.model_root)
    assert root is not None
    others = [r for r in (*part.sorted.model_roots, *part.sorted.other_models) if r != root]
    if others:
        names = ", ".join(map(shown, others))
        notes.append(f"left out: tensors at {names} (--model-root converts another one)")
    contents = part.contents
    values = model_values(contents, root)
    new = cleaned(values)
    _check_distinct(new)
    tensors = {new[name]: replace(t, name=new[name], origin=name) for name, t in values.items()}
    roles = {new[name]: contents.roles.get((*root, name), "unknown") for name in values}
    flats = flats_of(tensors)
    if not flats:
        if _layout_given(options):
            layout = _layout(options, part.candidate.path, notes)
            assert layout is not None
            return _told_by_layout(tensors, roles, layout)
        ordered = _in_module_order(tensors, contents.module_paths)
        return _Model(ordered, roles, ordered=contents.format != safetensors.FORMAT)
    layout = _layout(options, part.candidate.path, notes)
    if layout is None:
        if not for_inspection:
            raise OpenQuestion(_NO_LAYOUT.format(path=part.candidate.path, count=len(flats)))
        notes.append("flat parameters: names and shapes need --model, --hf-config or --layout")
        return _Model(tensors, roles)
    return _unflattened(flats, tensors, roles, layout, contents, options, notes)


def _told_by_layout(
    tensors: Mapping[str, Tensor], roles: Mapping[str, Role], layout: ModelLayout
) -> _Model:
    """The model's own order and roles, for a checkpoint that has names itself."""
    told: dict[str, Role] = dict.fromkeys((b.name for b in layout.buffers), "buffer")
    told.update(dict.fromkeys((p.name for p in layout), "parameter"))
    names = dict.fromkeys((*(p.name for p in layout if p.name in tensors), *tensors))
    known = {name: told.get(name, role) for name, role in roles.items()}
    return _Model({name: tensors[name] for name in names}, known, layout=layout)


def _in_module_order(
    tensors: Mapping[str, Tensor], module_paths: Sequence[str]
) -> Mapping[str, Tensor]:
    """
    In the order of the model's modules, which numbers an optimizer's parameters.

    torch 1.13 saved a sharded model unit by unit, the root last. Without the module names the order
    stays as it is.
    """
    place: dict[str, int] = {}
    for path in module_paths:
        place.setdefault(clean(path), len(place))
    if any(name.rpartition(".")[0] not in place for name in tensors):
        return tensors
    return dict(sorted(tensors.items(), key=lambda item: place[item[0].rpartition(".")[0]]))


_NO_LAYOUT = (
    "{path} holds {count} flat parameters of FSDP1 (LOCAL_STATE_DICT). Names and shapes of the "
    "parameters in them are not in the files: give --model PACKAGE.MODULE:FACTORY, "
    "--hf-config DIR or --layout FILE"
)


def _unflattened(
    flats: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, Role],
    layout: ModelLayout,
    contents: Contents,
    options: LoadOptions,
    notes: list[str],
) -> _Model:
    loose = {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in FLAT_KEYS}
    evidence = Evidence(
        loose=loose,
        views={
            _view_name(str(path[-1]), tensors).rpartition(".")[0]: {
                _view_name(name, tensors): at for name, at in found.items()
            }
            for path, found in contents.flat_views.items()
        },
        world_size=contents.group_size,
        writer=writer_of(contents.writer, options.source_torch),
    )
    with Gatherer() as gatherer:
        result = unflatten(flats, layout, evidence, gatherer.read)
    notes += result.notes
    kept = {name: t for name, t in loose.items() if name not in result.junk}
    both = {**result.tensors, **kept}
    order = {name: None for name in (*(p.name for p in layout), *both) if name in both}
    parameters: dict[str, Role] = dict.fromkeys(result.tensors, "parameter")
    return _Model(
        {name: both[name] for name in order},
        {**{name: roles[name] for name in kept}, **parameters},
        result.units,
        layout,
    )


def _view_name(name: str, tensors: Mapping[str, Tensor]) -> str:
    """The clean name of a view, which has a leading `module.` only if the model's tensors had."""
    plain = clean(name)
    bare = {clean(tensor.origin): new for new, tensor in tensors.items()}
    stripped = all(old == f"module.{new}" for old, new in bare.items())
    return plain.removeprefix("module.") if stripped else plain


def _layout(options: LoadOptions, path: Path, notes: list[str]) -> ModelLayout | None:
    """From what the user gave, else from a transformers config beside the checkpoint."""
    if options.model is not None and options.layout is not None:
        raise UsageError("--model and --layout both give the layout; give one")
    if options.layout is not None:
        return from_json(options.layout)
    if options.model is not None:
        return from_factory(options.model)
    if options.hf_config is not None:
        return from_hf_config(options.hf_config)
    here = path if path.is_dir() else path.parent
    for folder in (here, here / "huggingface", here.parent, here.parent / "huggingface"):
        if (folder / "config.json").is_file():
            notes.append(f"layout of the flat parameters: {folder / 'config.json'}")
            return from_hf_config(folder)
    return None


def _optimizer(
    source: Source,
    found: _Model,
    options: LoadOptions,
    notes: list[str],
    for_inspection: bool,
) -> tuple[Optimizer | None, tuple[Replica, ...]]:
    """The optimizer, and the copies of its states that a raw one leaves to be compared."""
    part = source.optimizer
    assert part is not None
    roots = [*part.sorted.optimizer_roots, *part.sorted.raw_roots]
    root = choose("optimizer", roots, options.optimizer_root)
    assert root is not None
    contents = part.contents
    numbered = is_numbered(contents.values, root)
    if root not in contents.raw and not numbered:
        return keyed_optimizer(contents, root), ()
    known = _known(source, found, options, notes)
    if known is None:
        if not for_inspection:
            raise OpenQuestion(_NO_NAMES.format(path=part.candidate.path))
        notes.append("the optimizer's states are numbered: names need the model, or its layout")
        return None, ()
    with Gatherer() as gatherer:
        if numbered:
            return raw_dcp.name(contents, root, known, gatherer.read), ()
        named = raw_optimizer.name(contents.raw[root], known, gatherer.read)
    notes += named.notes
    return named.optimizer, named.replicas


_NO_NAMES = (
    "{path} holds an optimizer whose states are numbered (optimizer.state_dict()), and no model "
    "beside it says which number is which parameter: give --model PACKAGE.MODULE:FACTORY, "
    "--hf-config DIR or --layout FILE, or a folder that holds the model files too"
)


def _known(
    source: Source, found: _Model, options: LoadOptions, notes: list[str]
) -> raw_optimizer.Known | None:
    """What the model beside a raw optimizer tells of it."""
    assert source.optimizer is not None
    part = source.model or source.optimizer
    flat = bool(flats_of(found.tensors))
    layout = found.layout
    if layout is None and (flat or not found.tensors or _layout_given(options)):
        layout = _layout(options, part.candidate.path, notes)
    if layout is None and found.tensors and not flat:
        index = Index(found.tensors, roles=found.roles)
        layout = from_index(index, str(part.candidate.path))
    if layout is None:
        return None
    contents = part.contents
    prefixes = [unit.prefix for unit in found.units]
    owned = {name for unit in found.units for name in unit.names()}
    return raw_optimizer.Known(
        layout=layout,
        prefixes=prefixes or raw_optimizer.wrap_prefixes(contents.module_paths),
        ignored=frozenset(p.name for p in layout if p.name not in owned) if owned else frozenset(),
        group_size=contents.group_size,
        writer=writer_of(contents.writer, options.source_torch),
        tensors=found.tensors or None,
        names=options.optimizer_names,
    )


def _layout_given(options: LoadOptions) -> bool:
    given = (options.model, options.layout, options.hf_config)
    return any(value is not None for value in given)


def _check_distinct(new: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, name in new.items():
        if name in seen:
            raise Incomplete(f"{seen[name]} and {old} are both {name} without their wrappers")
        seen[name] = old


def _check_coverage(optimizer: Optimizer, model: Mapping[str, Tensor]) -> None:
    """Every state must belong to a parameter, and elementwise states have its shape."""
    if not model:
        return
    unknown = [name for name in optimizer.state if name not in model]
    if unknown:
        raise Incomplete(
            f"the optimizer has state for {unknown[0]}"
            + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
            + ", which the model does not have; do the two belong together?"
        )


def _extras(part: Part, notes: list[str]) -> dict[KeyPath, object]:
    """
    What stands beside model and optimizer and can be carried; the rest is told.

    Values that differ between ranks (RNG states) belong to ranks, and objects of other classes than
    Python's own cannot be written.
    """
    contents = part.contents
    by_rank = contents.differing | {replica.path for replica in contents.replicas}
    carried: dict[KeyPath, object] = {}
    left_out: dict[str, None] = {}
    for path in part.sorted.extras:
        value = contents.values[path]
        if path and path not in by_rank and is_plain(value):
            carried[path] = value
        elif value != {}:
            alien = foreign_in(value)
            why = f" ({alien.qualified})" if alien else " (differs by rank)"
            left_out[f"{shown(path[:1])}{why}"] = None
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}")
    return carried
