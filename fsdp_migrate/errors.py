"""
Every error that a user can cause or meet. Anything else that escapes is a bug of ours.

MigrateError
├── UsageError            exit 2   the command was asked something it does not do
├── SourceError           exit 3   the input cannot be used
│   ├── UnknownFormat         nothing here recognises it
│   ├── Incomplete            rank files, chunks or elements are missing, doubled or at odds
│   ├── Corrupt               bytes are not what their own container says
│   ├── Forbidden             a pickle asks for something that is never run
│   └── Unsupported           understood, and refused with the reason
├── TargetError           exit 4   the output cannot be written
└── OpenQuestion          exit 5   only the user can say: the message names the missing fact
"""

from __future__ import annotations

from typing import ClassVar


class MigrateError(Exception):
    """Shown to the user as one message; `exit_code` is the process's exit status."""

    exit_code: ClassVar[int] = 3


class UsageError(MigrateError):
    exit_code = 2


class SourceError(MigrateError):
    exit_code = 3


class UnknownFormat(SourceError): ...


class Incomplete(SourceError): ...


class Corrupt(SourceError): ...


class Forbidden(SourceError): ...


class Unsupported(SourceError): ...


class TargetError(MigrateError):
    exit_code = 4


class OpenQuestion(MigrateError):
    exit_code = 5
