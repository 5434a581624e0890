"""
Carry out a plan: the only writer of files.

Output is built in a folder beside the target and renamed when whole, so that a kill at any moment
leaves nothing that looks finished. A few threads copy with small buffers (they stay in the cache)
into files whose space is reserved first; that is faster than `cp`, in a few MiB.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from isal import isal_zlib

from fsdp_migrate.checkpoint.cast import cast_into
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.plan import Copy, Literal, OutputFile, Plan
from fsdp_migrate.errors import TargetError

Progress: TypeAlias = Callable[[int], None]  # told of every few bytes that are done

BUFFER = 1 << 19  # bytes; larger ones fall out of the cache and are slower
THREADS = min(4, os.cpu_count() or 1)
_SPLIT = 64 << 20  # a longer copy is done by several threads
_MARK = ".partial-"


@contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """
    A path beside `target` to build the output at; renamed to `target` on success, else removed.

    Leftovers of killed runs are removed first. Raises `TargetError` where the target exists.
    """
    if os.path.lexists(target) and not overwrite:
        raise TargetError(f"{target} exists; give --overwrite to replace it, or another output")
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{_glob_escape(target.name)}{_MARK}*"):
            if _abandoned(stale):
                _remove(stale)
    except OSError as error:
        raise TargetError(f"{parent}: {error.strerror}") from None
    staging = parent / f"{target.name}{_MARK}{_own()}"
    try:
        yield staging
        _publish(staging, target)
    except OSError as error:
        raise TargetError(f"{error.filename or target}: {error.strerror}") from None
    finally:
        _remove(staging)


def execute(
    plan: Plan, staging: Path, progress: Progress = lambda _: None, *, sync: bool = False
) -> None:
    """
    Write every file of `plan` below `staging` (or at it, for a single file).

    `sync` waits until the disk has the bytes: after it not even a power failure loses them.
    """
    check_space(plan, staging.parent)
    try:
        targets = []
        for file in plan.files:
            path = staging if plan.single_file else staging / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            targets.append((file, path))
        if not plan.single_file:
            staging.mkdir(parents=True, exist_ok=True)
        for carried in plan.carried:
            _carry(carried.source, staging / carried.path, link=carried.link)
        with _open_all(targets) as outputs:
            _copy_all(outputs, progress)
        for _, path in targets if sync else ():
            _sync(path)
    except OSError as error:
        raise TargetError(f"{error.filename or staging}: {error.strerror}") from None


def check_space(plan: Plan, folder: Path) -> None:
    """Refuse before the first byte where the disk cannot hold the output (`TargetError`)."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if plan.bytes_to_write > free:
        raise TargetError(
            f"{folder}: the output needs {plan.bytes_to_write} bytes, {free} are free on that disk"
        )


@dataclass(frozen=True, slots=True)
class _Output:
    fd: int
    file: OutputFile


@contextmanager
def _open_all(targets: list[tuple[OutputFile, Path]]) -> Iterator[list[_Output]]:
    outputs: list[_Output] = []
    try:
        for file, path in targets:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            outputs.append(_Output(fd, file))
            _reserve(fd, file.size, path)
        yield outputs
    finally:
        for output in outputs:
            os.close(output.fd)


def _reserve(fd: int, size: int, path: Path) -> None:
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            os.truncate(fd, size)
        else:
            raise OSError(error.errno, error.strerror, str(path)) from None


@dataclass(frozen=True, slots=True)
class _Task:
    output: _Output
    copy: Copy
    start: int
    stop: int


def _copy_all(outputs: list[_Output], progress: Progress) -> None:
    tasks = _tasks(outputs)
    crcs: dict[int, list[tuple[int, int, int]]] = {}
    lock, stopped = threading.Lock(), threading.Event()

    def done(count: int) -> None:
        with lock:
            progress(count)

    def worker() -> None:
        with Gatherer() as gatherer:
            buffer = memoryview(bytearray(BUFFER))
            while not stopped.is_set():
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                crc = _copy(task, gatherer, buffer, done, stopped)
                if task.copy.crc_at:
                    with lock:
                        crcs.setdefault(id(task.copy), []).append((task.start, task.stop, crc))

    for output in outputs:
        for part in output.file.parts:
            if isinstance(part, Literal):
                _write(output.fd, memoryview(part.data), part.offset)
                progress(len(part.data))
    in_threads(worker, stopped)
    for output in outputs:
        for copy in output.file.copies():
            if copy.crc_at:
                value = struct.pack("<L", _combined(copy, crcs.get(id(copy), [])))
                for offset in copy.crc_at:
                    _write(output.fd, memoryview(value), offset)


def in_threads(worker: Callable[[], None], stopped: threading.Event) -> None:
    """Run `worker` on a few threads; the first error, or an interrupt, sets `stopped`."""
    with ThreadPoolExecutor(THREADS) as pool:
        futures: list[Future[None]] = [pool.submit(worker) for _ in range(THREADS)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
        for future in futures:
            future.result()


def _tasks(outputs: list[_Output]) -> Iterator[_Task]:
    """
    In the order of the files, so that a disk reads and writes in order too, but from a few files
    in turns: the kernel lets one thread at a time write to a file.
    """
    waiting = (_tasks_of(output) for output in outputs)
    active = deque(islice(waiting, THREADS))
    while active:
        stream = active.popleft()
        task = next(stream, None)
        if task is None:
            active.extend(islice(waiting, 1))
        else:
            active.append(stream)
            yield task


def _tasks_of(output: _Output) -> Iterator[_Task]:
    for copy in output.file.copies():
        step = max(_SPLIT // copy.tensor.type.bytes, 1)
        for start in range(copy.start, copy.stop, step):
            yield _Task(output, copy, start, min(start + step, copy.stop))


def _copy(
    task: _Task,
    gatherer: Gatherer,
    buffer: memoryview,
    progress: Progress,
    stopped: threading.Event,
) -> int:
    """Copy one task's elements; returns the CRC-32 of what was written (0 if not wanted)."""
    copy, tensor = task.copy, task.copy.tensor
    source, target = tensor.type.bytes, copy.nbytes // max(copy.stop - copy.start, 1)
    cast = copy.dtype != tensor.dtype
    step = max(len(buffer) // max(source, target), 1)
    crc = 0
    for start in range(task.start, task.stop, step):
        if stopped.is_set():
            return 0
        stop = min(start + step, task.stop)
        data = buffer[: (stop - start) * source]
        gatherer.read_into(tensor, start, stop, data)
        if cast:
            data = cast_into(data, tensor.dtype, copy.dtype)
        if copy.crc_at:
            crc = isal_zlib.crc32(data, crc)
        _write(task.output.fd, data, copy.offset + (start - copy.start) * target)
        progress(len(data))
    return crc


def _combined(copy: Copy, parts: list[tuple[int, int, int]]) -> int:
    crc, size = 0, copy.nbytes // max(copy.stop - copy.start, 1)
    for start, stop, part in sorted(parts):
        crc = isal_zlib.crc32_combine(crc, part, (stop - start) * size)
    return crc


def _write(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _carry(source: Path, target: Path, *, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            raise TargetError(
                f"{source} cannot be hard-linked to {target} ({error.strerror}); give --copy to "
                "copy its bytes"
            ) from None
    else:
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(staging: Path, target: Path) -> None:
    if os.path.lexists(target):
        old = target.with_name(f"{target.name}{_MARK}{_own()}-old")
        target.rename(old)
        staging.rename(target)
        _remove(old)
    else:
        staging.rename(target)
    _sync(target.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _own() -> str:
    """Host and process, so that runs on two nodes of a cluster never touch each other's output."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _abandoned(staging: Path) -> bool:
    """Whether a process of this host, now gone, was building at `staging`."""
    host, _, number = staging.name.rpartition(_MARK)[2].removesuffix("-old").rpartition("-")
    if host != socket.gethostname() or not number.isdigit():
        return False
    if int(number) == os.getpid():
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
