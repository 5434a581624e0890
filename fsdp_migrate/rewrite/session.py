"""
Many files together: read, told of one another, rewritten; in several processes if asked.

Every process keeps the files it parsed, so that each is parsed once. The rounds are the same for
one process and many: all facts first, then a second look at the facts now that the others' are
known, then the rewriting.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsdp_migrate.errors import SourceError
from fsdp_migrate.rewrite import configs
from fsdp_migrate.rewrite.engine import decide_wraps, interesting, parse, rewrite
from fsdp_migrate.rewrite.facts import collect, of_text
from fsdp_migrate.rewrite.file import File, Parsed
from fsdp_migrate.rewrite.options import Options
from fsdp_migrate.rewrite.project import Facts, Project
from fsdp_migrate.rewrite.report import Result
from fsdp_migrate.rewrite.source import Source

_NOT_SOURCE = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
_SUFFIXES = frozenset({".py", *configs.SUFFIXES})
_FACT_ROUNDS = 2
_STACK = 512 * 1024 * 1024
_RECURSION = 100_000
Answer = TypeVar("Answer")


def rewrite_files(
    paths: Iterable[Path | str], options: Options | None = None
) -> tuple[Result, ...]:
    """
    Rewrite files and the source and configuration files of folders, knowing of one another.
    Writes nothing.

    A file that cannot be read or parsed is a result with an `error`; the others go on. Raises
    SourceError for a path that does not exist.
    """
    options = options or Options()
    files = [str(path) for path in source_files(paths)]
    jobs = max(1, min(options.jobs, len(files)))
    shares = [files[start::jobs] for start in range(jobs)]
    if jobs == 1:
        return in_deep_stack(lambda: _rounds([Share(files, options)], files))
    workers = [_Worker(share, options) for share in shares]
    try:
        return _rounds(workers, files)
    finally:
        for worker in workers:
            worker.close()


def source_files(paths: Iterable[Path | str]) -> list[Path]:
    """The files to look at, each once, in a stable order."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
            found.update(dict.fromkeys(file for file in inside if not _is_hidden(file, path)))
        elif path.exists():
            found[path] = None
        else:
            raise SourceError(f"{path}: no such file or folder")
    return list(found)


def _is_hidden(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return any(part.startswith(".") or part in _NOT_SOURCE for part in parts)


class Part(Protocol):
    """Some of the files: they are asked for facts, and then to be rewritten."""

    def ask(self, project: Project, *, last: bool) -> None: ...

    def facts(self) -> list[Facts]: ...

    def results(self) -> list[Result]: ...


def _rounds(parts: Sequence[Part], order: list[str]) -> tuple[Result, ...]:
    project = Project()
    for _ in range(_FACT_ROUNDS):
        for part in parts:
            part.ask(project, last=False)
        project = Project.of(fact for part in parts for fact in part.facts())
    for part in parts:
        part.ask(project, last=True)
    done = {result.path: result for part in parts for result in part.results()}
    return tuple(done[path] for path in order)


class Share:
    """Files handled in this process."""

    def __init__(self, paths: Sequence[str], options: Options) -> None:
        self.options = options
        self.parsed: dict[str, Parsed] = {}
        self.done: dict[str, Result] = {}
        self.paths = paths
        self.plain: list[Facts] = []  # of files with nothing to rewrite
        self._facts: list[Facts] = []
        self._asked = 0
        for path in paths:
            self._read(path)

    def _read(self, path: str) -> None:
        text = ""
        try:
            text = Source.read(Path(path)).text
            if Path(path).suffix in configs.SUFFIXES:
                self.done[path] = configs.rewrite(path, text, self.options)
            elif interesting(text):
                self.parsed[path] = parse(text, path)
            else:
                self.done[path] = Result(path, text, text)
                self.plain.append(of_text(path, text))
        except SourceError as error:
            self.done[path] = Result(path, text, text, error=str(error))

    def ask(self, project: Project, *, last: bool) -> None:
        self._asked += 1
        if last:
            for path, parsed in self.parsed.items():
                if path not in self.done:
                    self.done[path] = self._guarded(parsed, project)
            return
        self._facts = list(self.plain)
        for path, parsed in self.parsed.items():
            if path in self.done:
                continue
            try:
                facts = collect(File(parsed, self.options, project))
                if self._asked == _FACT_ROUNDS:  # by now the others are known
                    wrapped, left = decide_wraps(parsed, self.options, project)
                    facts = replace(facts, wrapped=wrapped, left=left)
                self._facts.append(facts)
            except Exception as error:
                self.done[path] = _failed(parsed, error)

    def _guarded(self, parsed: Parsed, project: Project) -> Result:
        try:
            return configs.beside(rewrite(parsed, self.options, project), self.options)
        except Exception as error:  # a bug of ours must not stop the other files
            return _failed(parsed, error)

    def facts(self) -> list[Facts]:
        return self._facts

    def results(self) -> list[Result]:
        return [self.done[path] for path in self.paths]


def _failed(parsed: Parsed, error: Exception) -> Result:
    reason = " ".join(str(error).split())[:200]
    message = f"{parsed.path}: a rule failed ({type(error).__name__}: {reason}); left as it is"
    return Result(parsed.path, parsed.text, parsed.text, error=message)


class _Worker:
    """Files handled in another process, which keeps them between the rounds."""

    def __init__(self, paths: Sequence[str], options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, paths, options), daemon=True)
        self.process.start()
        other.close()

    def ask(self, project: Project, *, last: bool) -> None:
        self.pipe.send((project, last))

    def facts(self) -> list[Facts]:
        found: list[Facts] = self._receive()
        return found

    def results(self) -> list[Result]:
        found: list[Result] = self._receive()
        return found

    def _receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SourceError("a rewriting process died; try --jobs 1") from None

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.terminate()


def _serve(pipe: Connection, paths: Sequence[str], options: Options) -> None:
    in_deep_stack(lambda: _answer(pipe, paths, options))


def _answer(pipe: Connection, paths: Sequence[str], options: Options) -> None:
    share = Share(paths, options)
    last = False
    while not last:
        project, last = pipe.recv()
        share.ask(project, last=last)
        pipe.send(share.results() if last else share.facts())


def in_deep_stack(work: Callable[[], Answer]) -> Answer:
    """
    Run `work` where deep recursion is safe: libcst walks a tree by recursion, and a file may
    hold thousands of nested or concatenated expressions.
    """
    outcome: list[Answer] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK)
    sys.setrecursionlimit(_RECURSION)
    collecting = gc.isenabled()
    gc.disable()  # the trees all live to the end, and hold no cycles to look for again and again
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        if collecting:
            gc.enable()
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if failure:
        raise failure[0]
    return outcome[0]
