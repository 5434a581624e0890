"""
Write pickles that torch reads, without torch and without the classes they name.

A pickle is a program for a small stack machine; `Global`, `Call` and `Instance` spell its three
interesting instructions. Protocol 2, which is what torch.save writes and what `weights_only=True`
of every torch understands. Nothing is looked up, so a file for torch 2.6 can be written beside
torch 2.13.

Strings and globals are remembered (a model has few of them, used often); anything else that must
keep its identity, or be written only once, is wrapped in a `Shared`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from fsdp_migrate.errors import Unsupported

_BATCH = 1000  # as pickle does: the reader's stack stays small however long the container is


class Global(NamedTuple):
    """Something importable, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of calling `function(*args)`."""

    function: Global
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """`cls.__new__(cls, *args)`; then its `__setstate__` or `__dict__` gets `state`, if any."""

    cls: Global
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A persistent id: what torch.save puts where a storage stands."""

    id: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """A value written where it is first met; later meetings refer to that one."""

    value: Any


class Pickler:
    """One pickle being written: `add` values (or `raw` opcodes), then `finish`."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        # Global is a tuple of strings and Shared goes by identity: no two of these keys collide.
        self._memo: dict[str | Global | Shared, bytes] = {}

    def raw(self, opcodes: bytes) -> None:
        """Opcodes as they are, for the millions of alike records that `add` is too slow for."""
        self._out += opcodes

    def reference(self, value: str | Global | Shared) -> bytes:
        """Opcodes that push `value`, which is defined here and now if it has not been before."""
        if value not in self._memo:
            self.add(value)
            self._out += b"0"  # POP: only the memo keeps it
        return self._memo[value]

    def add(self, value: object) -> None:
        """Push `value`; `Unsupported` for a type that pickles here never hold."""
        emit = _EMITTERS.get(type(value))
        if emit is None:
            raise Unsupported(
                f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be "
                f"written: {value!r:.80}"
            )
        emit(self, value)

    def finish(self) -> bytes:
        self._out += b"."
        return bytes(self._out)

    def _remember(self, value: str | Global | Shared) -> None:
        number = len(self._memo)
        if number < 256:
            self._out += b"q%c" % number
            self._memo[value] = b"h%c" % number
        else:
            self._out += b"r" + struct.pack("<I", number)
            self._memo[value] = b"j" + struct.pack("<I", number)

    def _known(self, value: str | Global | Shared) -> bool:
        """Push `value` from the memo, if it is there."""
        known = self._memo.get(value)
        if known is None:
            return False
        self._out += known
        return True

    def _str(self, value: str) -> None:
        if not self._known(value):
            text = value.encode("utf-8", "surrogatepass")
            self._out += b"X" + struct.pack("<I", len(text)) + text
            self._remember(value)

    def _global(self, value: Global) -> None:
        if not self._known(value):
            self._out += b"c%s\n%s\n" % (value.module.encode(), value.name.encode())
            self._remember(value)

    def _shared(self, value: Shared) -> None:
        if not self._known(value):
            self.add(value.value)
            self._remember(value)

    def _int(self, value: int) -> None:
        self._out += integer(value)

    def _float(self, value: float) -> None:
        self._out += b"G" + struct.pack(">d", value)

    def _bytes(self, value: bytes) -> None:
        # Protocol 2 has no opcode for bytes; this is how Python spells them in it.
        self.add(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _tuple(self, value: tuple[object, ...]) -> None:
        if len(value) > 3:
            self._out += b"("
        for item in value:
            self.add(item)
        self._out += (b")", b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4)]

    def _list(self, value: list[object]) -> None:
        self._out += b"]"
        for start in range(0, len(value), _BATCH):
            self._out += b"("
            for item in value[start : start + _BATCH]:
                self.add(item)
            self._out += b"e"

    def _dict(self, value: dict[object, object]) -> None:
        self._out += b"}"
        self._items(value.items())

    def _ordered_dict(self, value: OrderedDict[object, object]) -> None:
        self.add(Call(Global("collections", "OrderedDict"), ()))
        self._items(value.items())

    def _items(self, items: Iterable[tuple[object, object]]) -> None:
        pairs = list(items)
        for start in range(0, len(pairs), _BATCH):
            self._out += b"("
            for key, item in pairs[start : start + _BATCH]:
                self.add(key)
                self.add(item)
            self._out += b"u"

    def _call(self, value: Call) -> None:
        self.add(value.function)
        self.add(value.args)
        self._out += b"R"

    def _instance(self, value: Instance) -> None:
        self.add(value.cls)
        self.add(value.args)
        self._out += b"\x81"
        if value.state is not None:
            self.add(value.state)
            self._out += b"b"

    def _persistent(self, value: Persistent) -> None:
        self.add(value.id)
        self._out += b"Q"

    def _constant(self, value: object) -> None:
        self._out += {None: b"N", True: b"\x88", False: b"\x89"}[value]  # type: ignore[index]


_Emitter: TypeAlias = Callable[[Pickler, Any], None]

# By exact type: a subclass (a tensor's Size, an Enum that is an int) would not come back as itself.
_EMITTERS: dict[type, _Emitter] = {
    str: Pickler._str,
    int: Pickler._int,
    float: Pickler._float,
    bool: Pickler._constant,
    type(None): Pickler._constant,
    bytes: Pickler._bytes,
    tuple: Pickler._tuple,
    list: Pickler._list,
    dict: Pickler._dict,
    OrderedDict: Pickler._ordered_dict,
    Global: Pickler._global,
    Call: Pickler._call,
    Instance: Pickler._instance,
    Persistent: Pickler._persistent,
    Shared: Pickler._shared,
}


def dumps(value: object) -> bytes:
    """`value` as a whole pickle."""
    pickler = Pickler()
    pickler.add(value)
    return pickler.finish()


def integer(value: int) -> bytes:
    """Opcodes that push an int."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if size < 256:
        return b"\x8a%c" % size + value.to_bytes(size, "little", signed=True)
    raise Unsupported(f"an integer of {size} bytes cannot be written")
