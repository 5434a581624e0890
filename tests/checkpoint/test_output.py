"""What becomes of the output, and of the source, when things go well and when they don't."""

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fsdp_migrate.checkpoint import execute
from tests.checkpoint.cases import ROOT, equal
from tests.checkpoint.command import converted, refused, run

RANKS = ROOT / "2.13.0" / "w2_full_block_orig_mesh" / "sharded_rank"
REPO = Path(__file__).parents[2]
NOBODY = 65534


def state_of(folder: Path) -> dict[str, tuple]:
    """Every file's bytes, times and mode."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("to", ["dcp", "hf", "torch"])
def test_the_source_is_not_touched(to, tmp_path) -> None:
    """Not a byte, not a time, no new file."""
    before = state_of(RANKS)
    converted(RANKS, tmp_path / "out", to)

    assert state_of(RANKS) == before


@pytest.mark.parametrize("to", ["dcp", "hf", "torch"])
@pytest.mark.parametrize("there", ["a folder", "an empty folder", "a file", "a dead link"])
def test_an_output_that_exists_is_refused_and_kept(to, there, tmp_path) -> None:
    """Unless --overwrite is given, and then it is replaced as a whole."""
    output = tmp_path / "out"
    match there:
        case "a folder":
            output.mkdir()
            (output / "precious").write_text("x")
        case "an empty folder":
            output.mkdir()
        case "a file":
            output.write_text("precious")
        case "a dead link":
            output.symlink_to(tmp_path / "nowhere")

    message = refused(4, "convert-ckpt", RANKS, output, "--to", to)
    assert "--overwrite" in message
    assert os.path.lexists(output)
    if there == "a folder":
        assert (output / "precious").read_text() == "x"

    converted(RANKS, output, to, "--overwrite")
    assert not (output / "precious").exists()
    names = {path.name for path in tmp_path.iterdir()}
    assert names <= {"out", "out.fsdp_migrate.json"}


def test_the_output_cannot_be_inside_or_over_the_source(tmp_path) -> None:
    """Overwriting what is being read would end both."""
    source = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, source)
    before = source.read_bytes()

    outcome = run("convert-ckpt", source, source, "--to", "torch", "--overwrite")
    if outcome.code == 0:
        assert equal(torch.load(source)["model"]["a"], torch.ones(3))
    else:
        assert source.read_bytes() == before


def test_dry_run_writes_nothing_and_shows_the_plan(tmp_path) -> None:
    """The same steps up to the plan."""
    outcome = run("convert-ckpt", RANKS, tmp_path / "out", "--to", "hf", "--dry-run")

    assert outcome.code == 0
    assert "model" in outcome.out
    assert list(tmp_path.iterdir()) == []


@contextmanager
def as_nobody() -> Iterator[Path]:
    """As a user without rights, in a folder of the user's own."""
    if os.geteuid() != 0:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101
        for path in (folder,):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_a_folder_without_permission_is_an_error_of_the_target() -> None:
    """Exit 4, and the folder is named."""
    with as_nobody() as folder:
        torch.save({"a": torch.ones(3)}, folder / "model.pt")
        locked = folder / "locked"
        locked.mkdir(mode=0o555)

        message = refused(4, "convert-ckpt", folder / "model.pt", locked / "out", "--to", "hf")
        assert "locked" in message and "ermission" in message
        assert list(locked.iterdir()) == []


def test_a_file_without_permission_is_an_error_of_the_source() -> None:
    """Exit 3, and the file is named; a folder that cannot be listed is one too."""
    with as_nobody() as folder:
        source = folder / "model.pt"
        torch.save({"a": torch.ones(3)}, source)
        source.chmod(0)
        assert "model.pt" in refused(3, "convert-ckpt", source, folder / "out", "--to", "hf")

        closed = folder / "closed"
        closed.mkdir()
        closed.chmod(0)
        assert "closed" in refused(3, "convert-ckpt", closed, folder / "out", "--to", "hf")


def test_a_read_only_source_is_enough() -> None:
    """Nothing is written beside it."""
    with as_nobody() as folder:
        source = folder / "source"
        source.mkdir()
        torch.save({"a": torch.ones(3)}, source / "model.pt")
        (source / "model.pt").chmod(0o444)
        source.chmod(0o555)

        converted(source, folder / "out", "hf")


@pytest.mark.parametrize("source", ["/dev/null", "/dev/zero", "fifo", "missing", "empty"])
def test_what_is_no_checkpoint_is_refused(source, tmp_path) -> None:
    """Devices, pipes, nothing at all: one message, at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").mkdir()

    refused(3, "convert-ckpt", tmp_path / source, tmp_path / "out", "--to", "hf")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_an_error_and_leaves_nothing(small_disk, tmp_path, monkeypatch, foreseen):
    """Foreseen before the first byte; or found while writing, if another program was faster."""
    source = tmp_path / "model.pt"
    torch.save({"a": torch.randn(100_000)}, source)
    if not foreseen:
        for module in (execute, sys.modules["fsdp_migrate.checkpoint.convert"]):
            monkeypatch.setattr(module, "check_space", lambda *_: None)

    for to in ("hf", "torch", "dcp"):
        message = refused(4, "convert-ckpt", source, small_disk / "out", "--to", to)
        assert "free" in message if foreseen else "space" in message
        assert list(small_disk.iterdir()) == []


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Large enough that a signal finds the conversion at work."""
    source = tmp_path_factory.mktemp("large") / "model.pt"
    torch.save({str(n): torch.randn(1 << 20) for n in range(24)}, source)
    return source


def started(source: Path, output: Path, *arguments: str) -> subprocess.Popen:
    """The command as a process of its own, once it has begun to write."""
    command = [sys.executable, "-m", "fsdp_migrate", "convert-ckpt", str(source), str(output)]
    process = subprocess.Popen(
        [*command, "--to", "hf", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )
    while not list(output.parent.iterdir()) and process.poll() is None:
        time.sleep(0.002)
    return process


def test_a_kill_at_any_moment_leaves_nothing_that_looks_whole(large, tmp_path) -> None:
    """And a second run succeeds, and clears away what the killed one left."""
    chance = random.Random(7)
    output = tmp_path / "out"
    for _ in range(4):
        process = started(large, output)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.communicate()
        if output.exists():  # the kill came too late
            assert run("compare-ckpt", large, output).code == 0
            execute._remove(output)

    converted(large, output, "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run("compare-ckpt", large, output).code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_ends_it_cleanly(large, tmp_path, number, as_json) -> None:
    """Exit 130, one word, nothing left; whole where it came too late."""
    output = tmp_path / "out"
    process = started(large, output, *(["--json"] if as_json else []))
    process.send_signal(number)
    out, err = process.communicate()

    if process.returncode == 0:
        pytest.skip("it was done before the signal came")
    assert process.returncode == 130, (process.returncode, err)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in (out if as_json else err)
    if as_json:
        assert re.search(r'"exit_code": 130', out)
