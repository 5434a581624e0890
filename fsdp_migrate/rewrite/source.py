"""
Bytes to text and back, so that a file that is not edited keeps every byte.

A byte order mark and the encoding a file declares are put back as they were; line endings are
libcst's business, which keeps each one.
"""

from __future__ import annotations

import codecs
import io
import os
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.errors import Corrupt, SourceError, TargetError


@dataclass(frozen=True, slots=True)
class Source:
    text: str
    encoding: str
    mark: bytes = b""

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a Python file. Raises SourceError when it is unreadable or not text."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}") from None
        return cls.decode(data, path)

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Source:
        mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            encoding = "utf-8" if mark else encoding
            return cls(data[len(mark) :].decode(encoding), encoding, mark)
        except (SyntaxError, UnicodeDecodeError, LookupError) as error:
            raise Corrupt(f"{path}: is not Python text: {error}") from None

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.encoding)

    def write(self, path: Path, text: str) -> None:
        """Replace `path` in one step, keeping its permissions; a link is followed, not replaced."""
        target = path.resolve()
        try:
            data = self.encode(text)
            mode = target.stat().st_mode
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                Path(name).chmod(mode & 0o7777)
                Path(name).replace(target)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise TargetError(f"{path}: cannot be written: {error.strerror}") from None
        except UnicodeEncodeError as error:
            raise TargetError(f"{path}: cannot be written as {self.encoding}: {error}") from None
