"""What a rule is: a name, a reason, worked examples, and one decision over a file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from textwrap import dedent
from typing import ClassVar

from fsdp_migrate.rewrite.file import File


@dataclass(frozen=True, slots=True)
class Example:
    """A rewrite as the user is told about it, run by the tests; equal sides mean "left alone"."""

    before: str
    after: str

    def __post_init__(self) -> None:
        for side in ("before", "after"):
            object.__setattr__(self, side, dedent(getattr(self, side)).strip() + "\n")


class Rule:
    """
    One kind of FSDP1 use and what becomes of it.

    `decide` looks at a file's uses and, for each one that is its business, either asks for
    edits and accounts for the use, or leaves the use whole with `file.todo`. It never changes
    anything itself. The class docstring is what `--explain` prints.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[Example, ...]]
    unsafe: ClassVar[bool] = False
    sweeps: ClassVar[bool] = False  # runs when values that nothing reads any more are gone

    def decide(self, file: File) -> None:
        raise NotImplementedError

    @classmethod
    def summary(cls) -> str:
        return cls.explanation().split("\n", 1)[0]

    @classmethod
    def explanation(cls) -> str:
        return inspect.cleandoc(cls.__doc__ or "")
