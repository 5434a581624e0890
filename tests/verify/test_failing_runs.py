"""Runs that end badly: who, when, why, where the log is, and nothing left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_migrate.errors import SourceError, Unsupported
from fsdp_migrate.verify.experiment import usable
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.trial import Job
from fsdp_migrate.verify.verdict import Kind
from tests.verify.launches import SCRIPTS, Bench, Run

HOW = {
    "crash": "RuntimeError: the planted crash",
    "exit": "exit code 7",
    "kill": "SIGSEGV",
    "stubborn": "no progress for 10 s",
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    failing, after = SCRIPTS / "failing.py", SCRIPTS / "fsdp2.py"
    runs = [Run("before", SCRIPTS / "fsdp1.py"), Run("short", after, ("--steps", "2"))]
    runs += [Run(how, failing, ("--how", how)) for how in HOW]
    runs.append(Run("correct", after))  # a failed trial must not harm the next one
    return Bench(tmp_path_factory.mktemp("failing"), runs, timeout=10)


def _processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder: ranks are started with their job file."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


@pytest.mark.parametrize("how", HOW)
def test_a_second_run_that_ends_badly_fails(bench: Bench, how: str) -> None:
    """The rank that failed by itself is named, with its last lines and its log."""
    verdict = bench.parity("before", how).verdict

    assert verdict.kind is Kind.FAIL
    assert HOW[how] in verdict.message
    assert "rank 1, after 2 optimizer steps" in verdict.message
    assert "rank1.log" in verdict.message


def test_nothing_is_left_of_a_run_that_ended_badly(bench: Bench) -> None:
    """Not even of a rank that ignores being asked to stop; and the next run is not harmed."""
    assert _processes_of(bench.folder) == []
    assert bench.parity("before", "correct").verdict.kind is Kind.PASS


def test_a_first_run_that_fails_is_no_baseline(bench: Bench) -> None:
    """Nothing can be said of the second script then: the input is unusable."""
    with pytest.raises(SourceError, match=r"the first run failed.*the planted crash"):
        usable(bench.traces("crash"))


def test_unequal_numbers_of_steps_fail(bench: Bench) -> None:
    """A second run that stops early is not the same training."""
    verdict = bench.parity("before", "short").verdict

    assert verdict.kind is Kind.FAIL
    assert "the first run made 4 optimizer steps, the second 2" in verdict.message


def test_an_endpoint_in_use_is_said(tmp_path: Path) -> None:
    """A rendezvous that cannot be opened is torchrun's failure, with its log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        job = Job(tmp_path, ())
        job.write()
        with pytest.raises(Unsupported, match=r"torchrun could not run the ranks.*torchrun\.log"):
            Torchrun(endpoint, wait=5).run(job)

    assert _processes_of(tmp_path) == []


def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    """Ctrl-C during a run: exit code 130 and no rank left."""
    command = [sys.executable, "-m", "fsdp_migrate", "verify", str(SCRIPTS / "fsdp1.py"), "--json"]
    command += ["--after", str(SCRIPTS / "fsdp2.py"), "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = tmp_path / "out" / "before" / "exact" / "rank0.jsonl"
    try:
        while not lines.exists():
            assert started.poll() is None
            time.sleep(0.2)
        started.terminate()
        out, _ = started.communicate(timeout=60)
    finally:
        started.kill()
        started.wait()

    assert started.returncode == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    assert _processes_of(tmp_path) == []
