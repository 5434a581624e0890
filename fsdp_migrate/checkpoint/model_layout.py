"""
What a checkpoint of flat parameters leaves out: the model's parameters in order, with their shapes.

A `ModelLayout` comes from the user's own model on the meta device, from a transformers config, from
a JSON file, or from another checkpoint of the same model. The order is that of
`named_parameters(remove_duplicate=False)`: modules in pre-order, each module's own parameters
first, which is how FSDP walks a module to flatten it.

The JSON form, version 1 (only `name` and `shape` must be given)::

    {"format": "fsdp-migrate model layout", "version": 1,
     "parameters": [{"name": "embed.weight", "shape": [32, 8], "dtype": "float32", "group": 0},
                    {"name": "head.weight", "shape": [32, 8], "same_as": "embed.weight"},
                    {"name": "conv.weight", "shape": [4, 2, 3], "strides": [6, 1, 2],
                     "trainable": false}],
     "buffers": [{"name": "rope.inv_freq", "shape": [4]}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.tensors import Shape, row_major
from fsdp_migrate.errors import SourceError

FORMAT = "fsdp-migrate model layout"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """
    One name of a parameter. `same_as` is the first name of the same parameter where it is shared.

    `strides` (in elements) matter to FSDP of torch 2.6 and later; None is contiguous. `trainable`
    is None where it is not known; `certain` is False where this may as well be a buffer. `group` is
    the optimizer's param group; where any parameter has one, those without are in no group.
    """

    name: str
    shape: Shape
    strides: Shape | None = None
    dtype: str | None = None
    same_as: str | None = None
    trainable: bool | None = None
    certain: bool = True
    group: int | None = None

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def module(self) -> str:
        """The FQN of the module that owns it."""
        return self.name.rpartition(".")[0]

    def memory_order(self) -> tuple[int, ...] | None:
        """
        The dimensions from the outermost to the innermost in memory; None where that is row-major.

        Raises `SourceError` for strides that leave gaps or overlap: FSDP cannot flatten those.
        """
        if self.strides is None or self.numel < 2:
            return None
        wide = [dim for dim, size in enumerate(self.shape) if size != 1]
        order = sorted(wide, key=lambda dim: -(self.strides or ())[dim])
        packed = row_major(tuple(self.shape[dim] for dim in order))
        if [self.strides[dim] for dim in order] != list(packed):
            raise SourceError(
                f"{self.name}: strides {list(self.strides)} of shape {list(self.shape)} leave gaps "
                "or overlap; FSDP cannot have flattened such a parameter"
            )
        if order == wide:
            return None
        return (*(dim for dim, size in enumerate(self.shape) if size == 1), *order)


@dataclass(frozen=True, slots=True)
class Buffer:
    name: str
    shape: Shape
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """`origin` says where it is from, for messages. Raises `SourceError` where names clash."""

    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...] = ()
    origin: str = "the model layout"

    def __post_init__(self) -> None:
        seen: dict[str, Parameter] = {}
        for parameter in self.parameters:
            _check(parameter, seen, self.origin)
            seen[parameter.name] = parameter
        for buffer in self.buffers:
            if buffer.name in seen:
                raise SourceError(f"{self.origin}: {buffer.name} is a parameter and a buffer")

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.parameters)

    def distinct(self) -> tuple[Parameter, ...]:
        """`model.parameters()`: each shared parameter once, under its first name."""
        return tuple(p for p in self.parameters if p.same_as is None)

    def tied(self, aliases: Mapping[str, str]) -> ModelLayout:
        """The same with `aliases` (later name to first name) as shared parameters."""
        return replace(
            self,
            parameters=tuple(
                replace(p, same_as=aliases[p.name]) if p.name in aliases else p
                for p in self.parameters
            ),
        )

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "parameters": [_plain(parameter) for parameter in self.parameters],
            "buffers": [_plain(buffer) for buffer in self.buffers],
        }
        return json.dumps(document, indent=1) + "\n"


def from_json(path: Path) -> ModelLayout:
    """Raises `SourceError` naming the place in the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SourceError(f'{path}: not a model layout (no "format": "{FORMAT}")')
    if document.get("version") != VERSION:
        raise SourceError(
            f"{path}: version {document.get('version')!r} of the model layout; this tool reads "
            f"version {VERSION}"
        )
    _only(document, {"format", "version", "parameters", "buffers"}, str(path))
    parameters = [
        Parameter(**_entry(item, f"{path}: parameters[{at}]", _PARAMETER))
        for at, item in enumerate(_listed(document, "parameters", path))
    ]
    buffers = [
        Buffer(**_entry(item, f"{path}: buffers[{at}]", _BUFFER))
        for at, item in enumerate(_listed(document, "buffers", path))
    ]
    return ModelLayout(tuple(parameters), tuple(buffers), str(path))


def from_index(index: Index, origin: str) -> ModelLayout:
    """
    The layout of a checkpoint whose names and shapes are known, in its own order.

    Floating tensors that the checkpoint does not call parameters are kept as uncertain ones: a
    buffer, or a parameter of a module that FSDP ignored. Two names over the same bytes are one
    shared parameter. Strides and requires_grad are in no checkpoint: each parameter is taken to be
    contiguous.
    """
    parameters, buffers = [], []
    first: dict[object, str] = {}
    for name, tensor in index.model.items():
        certain = index.role(name) == "parameter"
        if not certain and not tensor.type.floating:
            buffers.append(Buffer(name, tensor.shape, tensor.dtype))
            continue
        key = (tensor.pieces, tensor.shape)
        same = first.setdefault(key, name) if tensor.numel else name
        alias = None if same == name else same
        parameters.append(Parameter(name, tensor.shape, None, tensor.dtype, alias, certain=certain))
    return ModelLayout(tuple(parameters), tuple(buffers), origin)


def _check(parameter: Parameter, seen: Mapping[str, Parameter], origin: str) -> None:
    where = f"{origin}: {parameter.name}"
    if parameter.name in seen:
        raise SourceError(f"{where} is listed twice")
    if parameter.strides is not None and len(parameter.strides) != len(parameter.shape):
        raise SourceError(
            f"{where} has {len(parameter.strides)} strides for {len(parameter.shape)} dimensions"
        )
    if parameter.same_as is None:
        return
    first = seen.get(parameter.same_as)
    if first is None or first.same_as is not None:
        raise SourceError(
            f"{where} is said to be the same as {parameter.same_as}, which is no earlier parameter"
        )
    if first.shape != parameter.shape:
        raise SourceError(
            f"{where} of shape {list(parameter.shape)} cannot be the same as {first.name} of shape "
            f"{list(first.shape)}"
        )


def _plain(entry: Parameter | Buffer) -> dict[str, object]:
    names = _PARAMETER if isinstance(entry, Parameter) else _BUFFER
    values = {name: getattr(entry, name) for name in names}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and (name, value) != ("certain", True)
    }


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# Field: (what it must be, the test for it); `name` and `shape` are required.
_BUFFER = {
    "name": ("a name", _text),
    "shape": ("a list of sizes", _sizes),
    "dtype": ("a dtype of torch", lambda value: _text(value) and value in DTYPES),
}
_PARAMETER = {
    **_BUFFER,
    "strides": ("a list of strides", _sizes),
    "same_as": ("a name", _text),
    "trainable": ("true or false", lambda value: isinstance(value, bool)),
    "certain": ("true or false", lambda value: isinstance(value, bool)),
    "group": ("the number of a param group", lambda value: type(value) is int and value >= 0),
}


def _entry(item: Any, place: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise SourceError(f"{place}: expected an object, found {item!r:.60}")
    _only(item, set(fields), place)
    for name, (kind, good) in fields.items():
        if name not in item:
            if name in ("name", "shape"):
                raise SourceError(f"{place}: {name} is missing")
        elif not good(item[name]):
            raise SourceError(f"{place}.{name}: expected {kind}, found {item[name]!r:.60}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}


def _only(item: Mapping[str, Any], names: set[str], place: str) -> None:
    unknown = sorted(set(item) - names)
    if unknown:
        raise SourceError(f"{place}: unknown field {unknown[0]!r}; known are {sorted(names)}")


def _listed(document: Mapping[str, Any], name: str, path: Path) -> list[Any]:
    value = document.get(name, [])
    if not isinstance(value, list):
        raise SourceError(f"{path}: {name}: expected a list, found {value!r:.60}")
    return value
