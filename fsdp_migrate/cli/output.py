"""
What every command does with results, messages and errors.

Results go to stdout, messages and progress to stderr. Under `--json` stdout carries exactly one
JSON object, errors included. NO_COLOR is obeyed by rich itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from fsdp_migrate.errors import MigrateError, SourceError

INTERRUPTED = 130


def stdout() -> Console:
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def exits(*, as_json: bool) -> Iterator[None]:
    """Turn errors into one message and their exit code, and a signal into a clean stop (130)."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except MigrateError as error:
        _show(error, as_json)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if as_json:
            detail = {"kind": "Interrupted", "message": "interrupted", "exit_code": INTERRUPTED}
            print_json({"error": detail})
        else:
            stderr().print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as error:
        # Writing is wrapped where it happens; what is left could not be read.
        unread = SourceError(f"{error.filename}: {error.strerror}" if error.filename else error)
        _show(unread, as_json)
        raise typer.Exit(unread.exit_code) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


def _show(error: MigrateError, as_json: bool) -> None:
    if as_json:
        kind = type(error).__name__
        detail = {"kind": kind, "message": str(error), "exit_code": error.exit_code}
        print_json({"error": detail})
    else:
        stderr().print(f"[bold red]error:[/] {_escape(str(error))}")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
