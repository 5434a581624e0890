"""`fsdp-migrate verify` as it is called: exit codes, messages, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.launches import SCRIPTS

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = str(SCRIPTS / "fsdp1.py"), str(SCRIPTS / "fsdp2.py")


def verify(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fsdp_migrate", "verify", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["missing.py"], 3, "missing.py: no such script"),
        ([BEFORE, "--after", "missing.py"], 3, "missing.py: no such script"),
        (
            [BEFORE, "--after", AFTER, "--modes", "guess"],
            2,
            "--modes guess: expected exact or native",
        ),
        ([BEFORE, "--after", AFTER, "--launcher", "pbs"], 2, "--launcher pbs: expected one of"),
        ([BEFORE, "--after", AFTER, "--device", "tpu"], 2, "--device tpu"),
        ([BEFORE, "--after", AFTER, "--nproc-per-node", "1"], 2, "at least two"),
        ([BEFORE, "--after", AFTER, "--nnodes", "2"], 2, "--rdzv-endpoint"),
        ([BEFORE, "--after", AFTER, "--out", str(ROOT)], 4, "not an empty folder"),
    ],
)
def test_a_wrong_call_is_refused(args: list[str], code: int, says: str) -> None:
    """Nothing is started, the message names the option, and --json holds the error."""
    ended = verify(*args, "--json")

    assert ended.returncode == code, ended.stderr
    assert says in json.loads(ended.stdout)["error"]["message"]


def test_the_rewritten_script_is_the_second_by_default(tmp_path: Path) -> None:
    """Without --after the first script is rewritten in a copy; the result says all of it."""
    out = tmp_path / "out"
    script = ROOT / "fixtures" / "scripts" / "lora_frozen.py"
    ended = verify(str(script), "--steps", "3", "--modes", "exact", "--out", str(out), "--json")
    result = json.loads(ended.stdout)

    assert ended.returncode == 0, ended.stderr
    assert result["verdict"]["title"] == "PASS (bitwise)"
    assert result == json.loads((out / "result.json").read_text())
    assert result["experiment"]["after"]["script"] == str(out / "rewritten" / script.name)
    assert [step["difference"] for step in result["pairs"]["exact"]["steps"]] == [0.0] * 3
    assert "fully_shard" in (out / "rewritten" / script.name).read_text()


def test_places_left_by_the_rewrite_are_an_open_question(tmp_path: Path) -> None:
    """What rewrite-code cannot settle cannot be verified: exit 5 and the place."""
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "class Mine(FSDP):\n    pass\n"
    )
    ended = verify(str(script), "--json")
    error = json.loads(ended.stdout)["error"]

    assert (ended.returncode, error["kind"]) == (5, "OpenQuestion"), ended.stdout
    assert f"{script}:2" in error["message"]


def test_a_difference_is_exit_1_and_the_last_line_says_it(tmp_path: Path) -> None:
    """Arguments of one run only; the sentence names step and rank."""
    folder = tmp_path / "changed"
    folder.mkdir()
    (folder / "model.py").write_text((SCRIPTS / "model.py").read_text())
    changed = folder / "after.py"
    changed.write_text(Path(AFTER).read_text().replace("seed=1000 + rank", "seed=1000"))
    ended = verify(
        *(BEFORE, "--after", str(changed), "--steps", "3", "--modes", "exact"),
        *("--before-args", "--flat --accumulate 2", "--after-args", "--accumulate 2"),
    )

    assert ended.returncode == 1, ended.stderr
    last = " ".join(ended.stdout.splitlines()[-2:])
    assert "FAIL (rank 1 is given other inputs in step 0: it reads rank 0's data)" in last


def test_the_launch_script_can_be_printed_instead(tmp_path: Path) -> None:
    """--print-script starts nothing and prints what would be started, job files ready."""
    out = tmp_path / "out"
    ended = verify(BEFORE, "--after", AFTER, "--print-script", "--out", str(out), "--", "--bf16")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("torch.distributed.run") == 2
    job = json.loads((out / "before" / "job.json").read_text())
    assert job["trials"][0]["args"] == ["--bf16"]
