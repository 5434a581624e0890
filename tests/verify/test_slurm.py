"""The Slurm launcher against a real Slurm of two nodes, started and ended here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_migrate.errors import Unsupported, UsageError
from fsdp_migrate.verify.experiment import launch
from fsdp_migrate.verify.launchers.slurm import Slurm
from fsdp_migrate.verify.trial import Job, Trial
from tests.verify import slurm_cluster

SCRIPTS = Path(__file__).parent / "scripts"
TWO_NODES = ("--launcher", "slurm", "--nnodes", "2", "--nproc-per-node", "1")
real = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.fixture
def in_cluster(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two steps on two nodes; the folder's name is one that a shell or sbatch could mangle."""
    trial = Trial("exact", SCRIPTS / "fsdp1.py", steps=2, exact=True)
    return Job(tmp_path / "a run, %j $HOME", (trial,), nproc_per_node=1, nnodes=2, timeout=120)


def jobs() -> list[dict[str, str]]:
    """What Slurm itself remembers of its jobs."""
    told = subprocess.run(["scontrol", "show", "job", "-o"], capture_output=True, text=True)
    lines = [line for line in told.stdout.splitlines() if line.startswith("JobId=")]
    return [dict(p.split("=", 1) for p in line.split() if "=" in p) for line in lines]


def verify(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fsdp_migrate", "verify", *map(str, arguments)]


@real
@pytest.mark.usefixtures("in_cluster")
def test_verify_over_two_nodes_passes(tmp_path: Path) -> None:
    """Both scripts, each as a job of two nodes, from the submission to the verdict."""
    before = len(jobs())
    out = tmp_path / "out"
    done = subprocess.run(
        verify(
            *(SCRIPTS / "fsdp1.py", "--after", SCRIPTS / "fsdp2.py", *TWO_NODES),
            *("--steps", 2, "--modes", "exact", "--out", out, "--json"),
        ),
        capture_output=True,
        text=True,
        timeout=400,
    )
    made = jobs()[before:]

    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["verdict"]["title"] == "PASS (bitwise)"
    assert [(j["NumNodes"], j["JobState"], j["ExitCode"]) for j in made] == [
        ("2", "COMPLETED", "0:0")
    ] * 2
    assert len({j["JobName"] for j in made}) == 2


@real
@pytest.mark.usefixtures("in_cluster")
def test_inside_an_allocation_no_job_is_submitted(job: Job) -> None:
    """`salloc` holds the nodes; the launcher's srun uses them."""
    before = len(jobs())
    program = "import sys; from pathlib import Path; from fsdp_migrate.verify.trial import Job; "
    program += "from fsdp_migrate.verify.launchers.slurm import Slurm; "
    program += "Slurm().run(Job.read(Path(sys.argv[1])))"
    job.folder.mkdir()
    job.write()
    done = subprocess.run(
        ["salloc", "--nodes=2", "--quiet", sys.executable, "-c", program, str(job.file)],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    assert len(jobs()) == before + 1
    for rank in range(2):
        steps = (job.folder / "exact" / f"rank{rank}.jsonl").read_text()
        assert steps.count('{"event": "step"') == 2


@real
@pytest.mark.usefixtures("in_cluster")
def test_an_agent_that_fails_is_told_with_its_exit_code_and_log(job: Job) -> None:
    """The rank finds no job file: the job fails, and so does the launch, never quietly."""
    job.folder.mkdir()

    with pytest.raises(Unsupported, match=r"exit code 1\); log: .*slurm\.log") as told:
        Slurm().run(replace(job, nnodes=1))

    assert "n1: task 0: Exited with exit code 1" in str(told.value)
    assert "FileNotFoundError" in (job.folder / "slurm.log").read_text()
    assert jobs()[-1]["ExitCode"] == "1:0"


@real
@pytest.mark.usefixtures("in_cluster")
def test_a_job_that_slurm_refuses_is_told_in_slurm_s_words(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SBATCH_* variables reach the job: here a partition that does not exist."""
    monkeypatch.setenv("SBATCH_PARTITION", "no_such_partition")

    with pytest.raises(Unsupported, match="invalid partition specified: no_such_partition"):
        launch("before", job, Slurm())


@real
@pytest.mark.usefixtures("in_cluster")
def test_ctrl_c_cancels_the_job_and_leaves_nothing_running(tmp_path: Path) -> None:
    """SIGINT while the ranks run: exit code 130, an empty queue, and no rank left."""
    endless = tmp_path / "endless.py"
    endless.write_text("import time\nprint('here', flush=True)\ntime.sleep(3600)\n")
    out = tmp_path / "out"
    logs = [out / "before" / "exact" / f"rank{rank}.log" for rank in range(2)]
    command = verify(endless, "--after", endless, *TWO_NODES, "--out", out)
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        _wait_for(lambda: all(f.exists() for f in logs))
        process.send_signal(signal.SIGINT)
        process.wait(90)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130
    assert jobs()[-1]["JobState"] == "CANCELLED"
    queued = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True)
    assert queued.stdout == ""
    _wait_for(lambda: not _ranks(out))


def _ranks(marker: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(marker) in command and "verify.worker" in command:
            found.append(command)
    return found


def _wait_for(reached: object) -> None:
    assert callable(reached)
    deadline = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.2)


def test_the_script_is_one_that_bash_understands(job: Job) -> None:
    """--print-script writes it; names with blanks, percent and dollar signs stay what they are."""
    script = Slurm().script(job)

    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=2\n" in script
    assert "%%j $HOME/slurm.log'\n" in script
    assert "gpus" not in script


def test_gpus_are_asked_for_where_the_trials_need_them(job: Job) -> None:
    """One for each rank of a node."""
    on_gpu = replace(job, trials=(replace(job.trials[0], device="cuda"),), nproc_per_node=8)

    assert "#SBATCH --gpus-per-node=8\n" in Slurm().script(on_gpu)


def test_launches_have_names_and_rendezvous_of_their_own(job: Job) -> None:
    """Two launches never meet, and either can be cancelled by its name alone."""
    other = replace(job, folder=job.folder.with_name("another"))
    names = [
        next(line for line in Slurm().script(each).splitlines() if "--job-name" in line)
        for each in (job, other)
    ]

    assert names[0] != names[1]


def test_an_allocation_that_is_too_small_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun would wait for nodes that never come."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")

    with pytest.raises(UsageError, match=r"--nnodes 2: the allocation \(job 7\) has 1"):
        Slurm().run(job)


def test_without_slurm_the_message_says_what_is_missing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a traceback about a missing file."""
    monkeypatch.setattr(os, "environ", {"PATH": "/nonexistent"})

    with pytest.raises(Unsupported, match="no sbatch on PATH"):
        Slurm().run(job)
