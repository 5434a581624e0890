"""Runs that end badly: who, when, why, where the log is, and nothing left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_migrate.errors import SourceError
from fsdp_migrate.verify.experiment import Experiment, Side, run
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.verdict import Kind, Parity
from tests.verify.launches import SCRIPTS

BEFORE = Side(SCRIPTS / "fsdp1.py")


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


def _verify(folder: Path, after: Side, timeout: float = 20.0) -> Parity:
    experiment = Experiment(BEFORE, after, folder, 4, modes=("exact",), timeout=timeout)
    return run(experiment, Torchrun())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("crash", "RuntimeError: the planted crash"),
        ("exit", "exit code 7"),
        ("kill", "SIGSEGV"),
        ("stubborn", "no progress for 12 s"),
    ],
)
def test_a_second_run_that_ends_badly_fails(tmp_path: Path, how: str, says: str) -> None:
    """The rank that failed by itself is named, with its last lines and its log."""
    failing = Side(SCRIPTS / "failing.py", ("--how", how))
    verdict = _verify(tmp_path / "out", failing, timeout=12).verdict

    assert verdict.kind is Kind.FAIL
    assert says in verdict.message
    assert "rank 1, after 2 optimizer steps" in verdict.message
    assert f"about to {how}" in verdict.message or how == "stubborn"
    assert "rank1.log" in verdict.message
    assert _processes_of(tmp_path) == []


def test_a_first_run_that_fails_is_no_baseline(tmp_path: Path) -> None:
    """Nothing can be said of the second script then: the input is unusable."""
    side = Side(SCRIPTS / "failing.py", ("--how", "crash"))
    experiment = Experiment(side, side, tmp_path / "out", 4, modes=("exact",))

    with pytest.raises(SourceError, match="the first run failed.*the planted crash"):
        run(experiment, Torchrun())


def test_unequal_numbers_of_steps_fail(tmp_path: Path) -> None:
    """A second run that stops early is not the same training."""
    verdict = _verify(tmp_path / "out", Side(SCRIPTS / "fsdp2.py", ("--steps", "2"))).verdict

    assert verdict.kind is Kind.FAIL
    assert "the first run made 4 optimizer steps, the second 2" in verdict.message


def test_an_endpoint_in_use_is_said(tmp_path: Path) -> None:
    """A rendezvous that cannot be opened is torchrun's failure, with its log."""
    import socket

    from fsdp_migrate.errors import Unsupported

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        experiment = Experiment(BEFORE, BEFORE, tmp_path / "out", 2, modes=("exact",))
        with pytest.raises(Unsupported, match=r"torchrun could not run the ranks.*torchrun\.log"):
            run(experiment, Torchrun(endpoint, wait=5))

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
