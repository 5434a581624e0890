"""
Source text in, rewritten text and sites out.

Three passes over a file: collect (names, scopes, FSDP1 uses), decide (each rule asks for edits
and accounts for uses), apply (all edits at once, imports last). Nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import libcst as cst

from fsdp_migrate.errors import Corrupt, SourceError
from fsdp_migrate.rewrite.dead import drop_dead
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.imports import Kept, references, settle
from fsdp_migrate.rewrite.options import Options
from fsdp_migrate.rewrite.project import Project
from fsdp_migrate.rewrite.report import Result
from fsdp_migrate.rewrite.rules import ARGUMENT_RULES, RULES
from fsdp_migrate.rewrite.source import Source

_NOT_SOURCE = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
_INTERESTING = re.compile(
    r"torch\.distributed\.fsdp|distributed\s+import\s.*fsdp|FullyShardedDataParallel"
    r"|distributed\.checkpoint|_composable|fsdp",
    re.IGNORECASE,
)


def rewrite_source(
    text: str,
    options: Options | None = None,
    *,
    path: str = "<source>",
    project: Project | None = None,
) -> Result:
    """Rewrite one module's text. Raises Corrupt when it does not parse."""
    options = options or Options()
    if not _INTERESTING.search(text):
        return Result(path, text, text)
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, UnicodeError) as error:
        raise Corrupt(f"{path}: is not valid Python: {_where(error)}") from None
    file = File(path, module, options, project or Project())
    file.argument_rules = ARGUMENT_RULES
    for rule in RULES:
        if file.dual:
            break
        if options.wants(rule.name) and (options.unsafe or not rule.unsafe):
            file.rule = rule.name
            if rule.sweeps:
                drop_dead(file)
            rule().decide(file)
    after = _apply(file)
    return Result(path, text, after, file.sites)


def rewrite_files(
    paths: Iterable[Path | str], options: Options | None = None
) -> tuple[Result, ...]:
    """
    Rewrite files and the Python files of folders, knowing of one another. Writes nothing.

    A file that cannot be read or parsed is a result with an `error`; the others go on.
    """
    options = options or Options()
    project = Project()
    return tuple(_one_file(path, options, project) for path in python_files(paths))


def python_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files to look at, each once, in a stable order. Raises SourceError for a wrong path."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.rglob("*.py"))
            found.update(dict.fromkeys(file for file in inside if not _is_hidden(file, path)))
        elif path.exists():
            found[path] = None
        else:
            raise SourceError(f"{path}: no such file or folder")
    return list(found)


def _is_hidden(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return any(part.startswith(".") or part in _NOT_SOURCE for part in parts)


def _one_file(path: Path, options: Options, project: Project) -> Result:
    text = ""
    try:
        text = Source.read(path).text
        return rewrite_source(text, options, path=str(path), project=project)
    except SourceError as error:
        return Result(str(path), text, text, error=str(error))


def _apply(file: File) -> str:
    if not file.edits:
        return file.tree.module.code
    before = references(file.tree, file.names)
    module = file.edits.apply()
    kept = Kept(file.path, file.project.exported(file.path))
    return settle(module, file.needs, before, kept).code


def _where(error: Exception) -> str:
    if isinstance(error, cst.ParserSyntaxError):
        return f"line {error.raw_line}: {error.message.splitlines()[0]}"
    return str(error)
