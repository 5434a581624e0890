"""
What every rank runs: `python -m fsdp_migrate.verify.worker JOB`, under torchrun.

The rank imports torch once and forks a process for each trial, so that trials share nothing but
the imports, and a launch costs one start. This process only watches: it ends its trial when that
makes no progress, and when another rank's trial has failed (or this one would wait for it for
ever). Ranks tell each other through the agent's store, not through files, which a shared file
system may show late.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_migrate.verify.trial import Job, Trial

POLL = 0.05
GRACE = 5.0  # seconds other ranks get to fail by themselves, with a better message
PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    job = Job.read(Path(sys.argv[1]))
    job.started.touch()
    _import_once()
    store = _store()
    for index, trial in enumerate(job.trials):
        _Watched(job, trial, index, store).run()


def _import_once() -> None:
    """
    What every trial would import, before the first fork.

    Deterministic algorithms and the optimizers bring in torch's compilers, seconds each time.
    Frozen objects are not collected, so a trial's search for live modules sees its own only.
    """
    importlib.import_module("fsdp_migrate.verify.capture.rank")
    importlib.import_module("torch._inductor")
    gc.freeze()


def die_with_parent() -> None:
    """The kernel ends this process when its parent is gone: nothing is left running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _store() -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=300)
    return distributed_c10d.PrefixStore(
        "fsdp_migrate",
        dist.TCPStore(address, port, is_master=False, timeout=timeout),  # type: ignore[attr-defined]
    )


class _Watched:
    """One trial on this rank, from fork to end."""

    def __init__(self, job: Job, trial: Trial, index: int, store: Any) -> None:
        self.job, self.trial = job, trial
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = job.folder / trial.name
        self.store = distributed_c10d.PrefixStore(f"trial{index}", store)
        self.index = index
        self.lines = self.folder / f"rank{self.rank}.jsonl"
        self.child = 0

    def run(self) -> None:
        if not self._wanted():
            self._say(skipped=True)
            return
        self.child = os.fork()
        if self.child == 0:
            self._become_trial()
        signal.signal(signal.SIGTERM, self._stop)
        failure = self._watch()
        self._end_child()
        if failure:
            self._say(failure=failure)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._all_here()

    def _become_trial(self) -> None:
        from fsdp_migrate.verify.capture.rank import run_trial

        os.setpgid(0, 0)
        die_with_parent()
        log = os.open(self.folder / f"rank{self.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        try:
            run_trial(self.trial, self.folder, self.rank)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the watching process's code

    def _wanted(self) -> bool:
        """Rank 0 decides for all whether the trial is needed."""
        if self.trial.unless_fp32 is None:
            return True
        if self.rank == 0:
            lines = self.job.folder / self.trial.unless_fp32 / "rank0.jsonl"
            self.store.set("wanted", "1" if _used_low_precision(lines) else "0")
        return bool(self.store.get("wanted") == b"1")

    def _watch(self) -> str | None:
        """Wait until every rank is done, or say why this one is not."""
        seen, moved, doomed = 0, time.monotonic(), 0.0
        while True:
            gone, status = os.waitpid(self.child, os.WNOHANG)
            if gone:
                self.child = 0
                self.store.add("failed", 1)
                return _died(status)
            size = self.lines.stat().st_size if self.lines.exists() else 0
            if size > seen:
                seen, moved = size, time.monotonic()
                if size and not self._over and _has_ended(self.lines):
                    self._over = True
                    self.store.add("done", 1)
            if self.store.add("done", 0) == self.world:
                return None
            if not self._over and time.monotonic() - moved > self.job.timeout:
                self.store.add("failed", 1)
                return self._hung()
            if self.store.add("failed", 0):
                doomed = doomed or time.monotonic()
                if time.monotonic() - doomed > GRACE:
                    return None if self._over else "ended because another rank had failed"
            time.sleep(POLL)

    _over = False

    def _hung(self) -> str:
        os.kill(self.child, signal.SIGUSR1)  # faulthandler writes every thread's stack to the log
        time.sleep(0.5)
        return f"no progress for {self.job.timeout:g} s"

    def _end_child(self) -> None:
        """End the trial's whole process group: data loader workers too."""
        if self.child:
            for end in (os.killpg, os.kill):
                try:
                    end(self.child, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            os.waitpid(self.child, 0)
            self.child = 0

    def _all_here(self) -> None:
        """No rank starts the next trial while another is still ending this one."""
        self.store.add("ended", 1)
        while self.store.add("ended", 0) < self.world:
            time.sleep(POLL)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._end_child()
        os._exit(128 + signal.SIGTERM)

    def _say(self, **content: Any) -> None:
        with self.lines.open("a") as out:
            out.write(json.dumps({"event": "outcome", **content}) + "\n")


def _died(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _has_ended(lines: Path) -> bool:
    with lines.open("rb") as file:
        file.seek(max(0, lines.stat().st_size - 4096))
        return b'{"event": "end"' in file.read()


def _used_low_precision(lines: Path) -> bool:
    """Whether a rank's record names a floating dtype below fp32."""
    if not lines.exists():
        return False
    text = lines.read_text()
    return any(f"torch.{dtype}" in text for dtype in ("bfloat16", "float16"))


if __name__ == "__main__":
    main()
