"""What bench says when rows, models or arguments are no good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fsdp_migrate.cli import app
from tests.verify.test_bench import COMMAND, bench, llama

MARKER = "BENCH_TEST"
SMALL = ("--device", "cpu", "--nproc-per-node", 2, "--batch", 1, "--seq-len", 8)
SHORT = ("--steps", 1, "--warmup", 1, "--dtype", "fp32")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command in this process: for what ends before a rank is started."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return lambda *arguments: CliRunner().invoke(app, ["bench", *map(str, arguments)])


def by_name(text: str) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(text)["rows"]}


def left_running(marker: Path) -> list[str]:
    """Live processes whose environment says that they came from this test's own bench."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARKER}={marker}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_a_row_that_goes_wrong_is_a_line_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, a crash, a killed rank and a mesh that doesn't fit: the others still run."""
    monkeypatch.setenv(MARKER, str(tmp_path))
    done = bench(
        *("--model", "bench_models:Troubled", *SMALL, *SHORT, "--out", tmp_path / "out", "--json"),
        *("--rows", "ddp,fsdp1,fsdp2,fsdp2-tp,hsdp,fsdp2-frozen"),
    )
    rows = by_name(done.stdout)

    assert done.returncode == 1, done.stderr
    assert "out of memory: RuntimeError: " in done.stderr
    assert rows["fsdp1"]["status"] == "ran"
    assert rows["ddp"]["status"] == "out of memory"
    assert "can't allocate memory" in rows["ddp"]["reason"]
    assert rows["fsdp2"]["status"] == "failed"
    assert "the dog ate rank 1" in rows["fsdp2"]["reason"]
    assert "SIGKILL" in rows["fsdp2-frozen"]["reason"]
    assert rows["fsdp2-tp"]["status"] == "cannot run"
    assert "Troubled isn't one" in rows["fsdp2-tp"]["reason"]
    assert rows["hsdp"]["status"] == "cannot run"
    assert "2 ranks" in rows["hsdp"]["reason"]
    assert left_running(tmp_path) == []


def test_a_row_that_hangs_is_ended_and_nothing_is_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is a row's own; with no row run at all the exit code says so."""
    monkeypatch.setenv(MARKER, str(tmp_path))
    done = bench(
        *("--model", "bench_models:Hanging", *SMALL, *SHORT, "--out", tmp_path / "out", "--json"),
        *("--rows", "fsdp2", "--timeout", 12),
    )

    assert done.returncode == 3
    assert "timed out: no end after 12 s" in json.loads(done.stdout)["error"]["message"]
    assert left_running(tmp_path) == []


def test_a_model_may_bring_its_own_batches_and_loss(tmp_path: Path) -> None:
    """`bench_batch` feeds models that eat no tokens."""
    done = bench(
        *("--model", "bench_models:Regression", *SMALL, *SHORT, "--out", tmp_path / "out"),
        *("--rows", "fsdp1,fsdp2", "--json"),
    )

    assert done.returncode == 0, done.stderr
    assert by_name(done.stdout)["fsdp2"]["parity"] == "bitwise"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ((), 2, "--hf-config DIR or --model MODULE:FUNCTION"),
        (("--model", "no_colon"), 2, "expected MODULE:FUNCTION"),
        (("--model", "no_such_module:f"), 3, "No module named 'no_such_module'"),
        (("--model", "bench_models:no_such_function"), 3, "has no function no_such_function"),
        (("--model", "bench_models:Tiny", "--rows", "fsdp3"), 2, "no such row; there are ddp, "),
        (("--model", "bench_models:Tiny", "--dtype", "int8"), 2, "expected one of fp32, bf16"),
        (("--model", "bench_models:Tiny", "--steps", "0"), 2, "at least 1"),
        (("--hf-config", "no/such/folder"), 3, "no config.json"),
    ],
)
def test_wrong_arguments_are_told_before_any_rank_is_started(
    tmp_path: Path,
    at_once: Callable[..., Result],
    arguments: tuple[str, ...],
    exit_code: int,
    message: str,
) -> None:
    """One JSON object with the message, and the exit code of its kind."""
    done = at_once(*arguments, "--device", "cpu", "--out", tmp_path / "out", "--json")

    error = json.loads(done.stdout)["error"]
    assert done.exit_code == error["exit_code"] == exit_code
    assert message in error["message"]
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused_and_a_strange_one_never_emptied(
    tmp_path: Path, at_once: Callable[..., Result]
) -> None:
    """--overwrite replaces what bench wrote, and nothing else."""
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    common = ("--hf-config", llama(tmp_path / "model"), *SMALL, "--out", tmp_path, "--json")

    refused, left = at_once(*common), at_once(*common, "--overwrite")

    assert refused.exit_code == left.exit_code == 4
    assert "--overwrite" in json.loads(refused.stdout)["error"]["message"]
    assert "left alone" in json.loads(left.stdout)["error"]["message"]
    assert kept.read_text() == "years of work"


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_bench_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    """Ctrl-C ends the ranks; should the command itself be killed, they end with it."""
    model = ("--model", "bench_models:Hanging", *SMALL, *SHORT)
    command = [*COMMAND, *model, "--out", tmp_path / "out", "--rows", "ddp"]
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=Path(__file__).parent,
        env={**os.environ, MARKER: str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    try:
        _until((tmp_path / "out" / "rows" / "ddp" / "output.log").exists)
        process.send_signal(number)
        assert process.wait(60) == exit_code
    finally:
        process.kill()
        process.wait()

    _until(lambda: left_running(tmp_path) == [])


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)
