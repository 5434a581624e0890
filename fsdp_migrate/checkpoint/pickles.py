"""
Unpickle checkpoints without running anything in them.

`find_class` never imports: names that torch's files hold map to the inert types below, everything
else is recorded as `Foreign` or, where a pickle reaches for the standard library, refused. The
names are those seen in files of torch 1.13.1 to 2.15.0.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from fsdp_migrate.checkpoint.bounds import check_tree, limited_memory
from fsdp_migrate.checkpoint.dtypes import DTYPES, FROM_STORAGE
from fsdp_migrate.checkpoint.tensors import Shape
from fsdp_migrate.errors import Corrupt, Forbidden, Unsupported

PersistentLoad: TypeAlias = Callable[[Any], object]


@contextmanager
def decoding(what: object) -> Iterator[None]:
    """
    Around code that takes a pickle's records apart: whatever a damaged or forged record provokes
    there is `Corrupt`.
    """
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        struct.error,
    ) as error:
        raise Corrupt(
            f"{what}: a record in it is damaged ({type(error).__name__}: {error})"
        ) from None


@dataclass(frozen=True, slots=True)
class TorchDType:
    """`torch.float32` and the like; `name` without the prefix."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageType:
    """A typed storage class of torch; `dtype` is None for UntypedStorage."""

    dtype: str | None


class Inert:
    """A torch object, as its constructor arguments and state; made by pickle, never by us."""

    __slots__ = ("args", "state")
    qualified: ClassVar[str] = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}  # (__dict__, __slots__) of a slotted class
        self.state = state

    def field(self, name: str) -> Any:
        """One entry of the state; `Corrupt` where the class's own field is absent."""
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        raise Corrupt(f"a pickled {self.qualified} lacks its field {name!r}")


class Foreign(Inert):
    """An object of a class that is not torch's: kept inert, to be named and left out."""

    # pickle fills containers it rebuilds through these; what they held is not wanted.
    def append(self, _item: Any) -> None: ...
    def extend(self, _items: Any) -> None: ...
    def add(self, _item: Any) -> None: ...
    def __setitem__(self, _key: Any, _value: Any) -> None: ...


class SavedDict(OrderedDict[Any, Any]):
    """
    What `OrderedDict` and `Counter` become. Of the attributes a pickle sets only the `_metadata` of
    nn.Module.state_dict() is kept: others could hide a dict's own methods.
    """

    _metadata: Any = None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict) and "_metadata" in state:
            self._metadata = state["_metadata"]


class Row:
    """
    An `Inert` of which there may be millions: its state dict becomes its `__dict__`, by pickle's
    own C code.
    """


@dataclass(frozen=True, slots=True)
class Stored:
    """
    A plain tensor as pickled: `shape` and `strides` in elements, first element at byte `offset` of
    `path`; `storage` tells views of one storage apart from copies.
    """

    dtype: str
    shape: Shape
    strides: Shape
    path: Path
    offset: int
    storage: str
    parameter: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage record: `nbytes` bytes at `offset` of `path`."""

    dtype: str | None
    path: Path
    offset: int
    nbytes: int
    key: str


_NUMPY_SCALARS = {
    "f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "i2": "<h", "i1": "<b",
    "u8": "<Q", "u4": "<I", "u2": "<H", "u1": "<B", "b1": "<?",
}  # fmt: skip
# Modules of the standard library whose objects may stand beside a model; by full name.
_HARMLESS = {
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PureWindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("datetime", "datetime"),
    ("datetime", "date"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("uuid", "SafeUUID"),
    ("random", "Random"),
    ("enum", "Enum"),
    ("enum", "IntEnum"),
    ("_codecs", "encode"),
    ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"),
    ("builtins", "object"),
    ("builtins", "bytearray"),
    ("builtins", "slice"),
    ("builtins", "range"),
    ("functools", "partial"),
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): SavedDict,
    ("collections", "Counter"): SavedDict,
    ("collections", "deque"): deque,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
    ("builtins", "str"): str,
    ("builtins", "bool"): bool,
    ("builtins", "bytes"): lambda: b"",  # called so for empty ones only; bytes(10**10) is a bomb
    ("torch", "Size"): tuple,
}
_ROWS = re.compile(
    r"torch\.distributed\.(_shard\.)?checkpoint\.(metadata\.(MetadataIndex|ChunkStorageMetadata)|"
    r"filesystem\._StorageInfo)"
)
# torch's functions that a pickle may call: each is replaced by a method or a record, none is run.
_OPAQUE_TORCH = re.compile(
    r"torch\.(distributed\.[\w.]+|device|Generator|serialization\._get_layout|layout|memory_format|"
    r"nn\.parameter\.(Parameter|Buffer|UninitializedParameter)|Tensor|nn\.modules\.[\w.]+|"
    r"optim\.[\w.]+|amp\.[\w.]+|cuda\.amp\.[\w.]+|torch_version\.TorchVersion)"
)


class Unpickler(pickle.Unpickler):
    """
    Reads one pickle from `data` of the archive at `path`.

    `storages` gives the storage record of a key (`Corrupt` if there is none); None where a pickle
    must hold no tensor. Raises `Forbidden` for a global that would have to be run, `Corrupt` for
    anything pickle itself cannot make sense of.
    """

    def __init__(
        self, data: bytes, path: Path, storages: Callable[[str], tuple[int, int]] | None = None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._path, self._size = path, len(data)
        self._storages = storages
        self._known: dict[tuple[str, str], Any] = {}

    def load(self) -> Any:
        try:
            with limited_memory(self._size):
                tree = super().load()
            check_tree(tree, self._path)
            return tree
        except (Forbidden, Corrupt, Unsupported):
            raise
        except RecursionError:
            raise Corrupt(f"{self._path}: its pickle is nested too deep") from None
        except MemoryError:
            raise Corrupt(f"{self._path}: its pickle claims more memory than there is") from None
        except Exception as error:
            # Whatever a damaged stream of opcodes provokes in the inert types is damage.
            raise Corrupt(
                f"{self._path}: its pickle is damaged ({type(error).__name__}: {error})"
            ) from None
        finally:
            # Both refer to this unpickler again, and would keep all it has read alive with it.
            self._known.clear()
            self.memo.clear()

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._known:
            self._known[key] = self._resolve(module.replace("__builtin__", "builtins"), name)
        return self._known[key]

    def _resolve(self, module: str, name: str) -> Any:
        plain = _PLAIN.get((module, name))
        if plain is not None:
            return plain
        if module == "collections" and name == "defaultdict":
            return lambda *args: defaultdict(None, *args[1:])
        if module == "builtins" and name == "getattr":
            return self._getattr
        if module == "torch" and name in DTYPES:
            return TorchDType(name)
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return self._storage_type(name)
        if module in ("torch._utils", "torch._tensor", "torch.nn.parameter"):
            rebuild = getattr(self, f"_torch{name}", None)
            if rebuild is not None:
                return rebuild
            if name.startswith("_rebuild"):
                raise Unsupported(f"{self._path}: tensors of {name[9:]} are not supported")
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "scalar":
            return self._numpy_scalar
        full = f"{module}.{name}"
        if _ROWS.fullmatch(full):
            return type(name, (Row,), {})
        if _OPAQUE_TORCH.fullmatch(full):
            return type(name, (Inert,), {"qualified": full, "__slots__": ()})
        return self._foreign(module, name)

    def _foreign(self, module: str, name: str) -> Any:
        top = module.partition(".")[0]
        standard = top in sys.stdlib_module_names or top in (
            "__builtin__",
            "copy_reg",
            "nt",
            "posix",
        )
        if (standard and (module, name) not in _HARMLESS) or top == "torch" or "." in name:
            raise Forbidden(
                f"{self._path}: its pickle asks for {module}.{name}, which has no place in a "
                "checkpoint and is never run"
            )
        return type(name, (Foreign,), {"qualified": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Storage:
        if self._storages is None:
            raise Corrupt(f"{self._path}: a tensor where only plain values belong")
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise Unsupported(f"{self._path}: unknown kind of persistent id {pid!r:.80}")
        _, kind, key, _location, numel = pid
        if not isinstance(kind, StorageType) or not isinstance(key, str):
            raise Corrupt(f"{self._path}: storage {key!r} has no known type")
        offset, size = self._storages(key)
        item = 1 if kind.dtype is None else DTYPES[kind.dtype].bytes
        if numel * item != size:
            raise Corrupt(
                f"{self._path}: storage {key} should have {numel * item} bytes, its record {size}"
            )
        return Storage(kind.dtype, self._path, offset, size, key)

    def _storage_type(self, name: str) -> StorageType:
        if name in ("UntypedStorage", "_UntypedStorage"):
            return StorageType(None)
        if name in FROM_STORAGE:
            return StorageType(FROM_STORAGE[name].name)
        raise Unsupported(f"{self._path}: tensors on a torch.{name} are not supported")

    # What torch's rebuild functions become. Their names are torch's, behind `_torch`.

    def _torch_rebuild_tensor_v2(
        self,
        storage: Any,
        offset: int,
        shape: Shape,
        strides: Shape,
        _requires_grad: bool = False,
        _hooks: Any = None,
        metadata: Any = None,
    ) -> Stored:
        return self._stored(storage, None, offset, shape, strides, metadata)

    def _torch_rebuild_tensor(
        self, storage: Any, offset: int, shape: Shape, strides: Shape
    ) -> Stored:
        return self._stored(storage, None, offset, shape, strides, None)

    def _torch_rebuild_tensor_v3(
        self,
        storage: Any,
        offset: int,
        shape: Shape,
        strides: Shape,
        _requires_grad: bool,
        _hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> Stored:
        return self._stored(storage, dtype, offset, shape, strides, metadata)

    def _torch_rebuild_parameter(self, data: Any, *_: Any) -> Any:
        if isinstance(data, Stored):
            return Stored(
                data.dtype, data.shape, data.strides, data.path, data.offset, data.storage, True
            )
        return data

    _torch_rebuild_parameter_with_state = _torch_rebuild_parameter

    def _torch_rebuild_wrapper_subclass(self, *args: Any) -> Any:
        return args

    def _torch_rebuild_from_type_v2(self, rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
        value = rebuild(*args)
        if isinstance(value, Stored):
            # FSDP of torch 2.0 and later marks each parameter it clones for a full state dict.
            cloned = isinstance(state, dict) and state.get("_has_been_cloned") is True
            return self._torch_rebuild_parameter(value) if cloned else value
        if not (isinstance(kind, type) and issubclass(kind, Inert)):
            raise Unsupported(f"{self._path}: a tensor subclass that is not known: {kind!r:.80}")
        made = kind(*args)
        made.__setstate__(state)
        return made

    def _getattr(self, _owner: Any, name: str) -> Any:
        """Only ever used for ShardedTensor's nested class ProcessGroupState."""
        owner = getattr(_owner, "qualified", "")
        if owner.endswith("sharded_tensor.api.ShardedTensor") and name == "ProcessGroupState":
            return type(name, (Inert,), {"qualified": f"{owner}.{name}", "__slots__": ()})
        raise Forbidden(
            f"{self._path}: its pickle asks for getattr(…, {name!r}), which is never run"
        )

    def _numpy_scalar(self, dtype: Any, data: Any = b"") -> Any:
        """A numpy number, as schedulers leave them in param groups: the same Python number."""
        code = dtype.args[0] if isinstance(dtype, Foreign) and dtype.args else None
        if isinstance(data, Foreign) and len(data.args) == 2:
            data = str(data.args[0]).encode(str(data.args[1]))  # protocol 2 spells bytes so
        layout = _NUMPY_SCALARS.get(str(code))
        if layout is None or not isinstance(data, bytes) or len(data) != struct.calcsize(layout):
            return type("scalar", (Foreign,), {"qualified": "numpy.scalar"})()
        return struct.unpack(layout, data)[0]

    def _stored(
        self, storage: Any, dtype: Any, offset: int, shape: Any, strides: Any, metadata: Any
    ) -> Stored:
        if not isinstance(storage, Storage):
            raise Corrupt(f"{self._path}: a tensor without a storage")
        if metadata:
            raise Unsupported(f"{self._path}: conjugated or negated views are not supported")
        name = dtype.name if isinstance(dtype, TorchDType) else storage.dtype
        if name is None:
            raise Corrupt(f"{self._path}: a tensor on an untyped storage without a dtype")
        shape, strides = tuple(shape), tuple(strides)
        size = DTYPES[name].bytes
        numbers = (offset, *shape, *strides)
        if len(shape) != len(strides) or any(type(n) is not int or n < 0 for n in numbers):
            raise Corrupt(f"{self._path}: a tensor of shape {shape}, strides {strides}")
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * size > storage.nbytes:
            raise Corrupt(
                f"{self._path}: a tensor of shape {list(shape)} reaches past its storage "
                f"{storage.key}"
            )
        where = storage.offset + offset * size
        return Stored(name, shape, strides, storage.path, where, storage.key)
