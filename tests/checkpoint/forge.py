"""Files that torch would not write: archives with any pickle, or any record, in them."""

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def archive(path: Path, pickled: bytes, records: Mapping[str, bytes] | None = None) -> Path:
    """A torch archive whose data.pkl is `pickled`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
        file.writestr("archive/version", b"3\n")
    return path


class Call:
    """Pickles as the call of `function`, a dotted name that need not exist, with `arguments`."""

    def __init__(self, module: str, function: str, *arguments: Any) -> None:
        self.module, self.function, self.arguments = module, function, arguments


class _Pickler(pickle._Pickler):  # the one in Python, whose opcodes can be chosen
    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Call):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.function}\n".encode())
            super().save(value.arguments)
            self.write(pickle.REDUCE)
        elif isinstance(value, torch.Tensor):
            # A float32 tensor on storage 0, as torch pickles it.
            self.write(b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage")
            self.write(b"ctorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu")
            super().save(value.numel())
            self.write(b"tQK\x00")
            super().save(tuple(value.shape))
            super().save(tuple(value.stride()))
            self.write(b"\x89ccollections\nOrderedDict\n)RtR")
        else:
            super().save(value, save_persistent_id)


def dumps(value: Any) -> bytes:
    """A pickle of `value` with its `Call`s; all tensors lie on storage "0"."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def model_file(path: Path, value: Any, numel: int = 4) -> Path:
    """A torch archive of `value`, with a storage of `numel` float32 ones."""
    return archive(path, dumps(value), {"data/0": torch.ones(numel).numpy().tobytes()})
