"""
Slurm: one torchrun agent on each node of a job.

Outside an allocation the script is submitted with `sbatch --wait`; inside one (salloc, a batch
script of the user's own) the same script runs as it is, and its `srun` uses that allocation.
Partition, account, time limit and the like come from the user's SBATCH_* variables, as for any
other job: the script asks for nodes, cores and GPUs only.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.errors import Unsupported, UsageError
from fsdp_migrate.verify.launchers.torchrun import environment
from fsdp_migrate.verify.processes import last_lines, run_group
from fsdp_migrate.verify.trial import Job

PATIENCE = 30.0  # seconds a cancelled job gets to be gone
EXPORTED = ("PYTHONPATH", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")

# Host names of nodes need not resolve, so each node's address is the one that Slurm itself uses.
# Only the head node can tell which of its ports is free. A step inside another step (an
# interactive shell) must share its resources: --overlap.
BODY = r"""
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
export -f address_of

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hosts=("${hosts[@]:0:$nodes}")
port=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}" "$python" -c \
    'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export ENDPOINT="$(address_of "${hosts[0]}"):$port"

srun --overlap --job-name="$name" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
    --cpus-per-task="$ranks" --nodelist="$(IFS=,; echo "${hosts[*]}")" --kill-on-bad-exit=1 \
    bash -c 'exec "$0" -m torch.distributed.run --local-addr="$(address_of "$SLURMD_NODENAME")" \
        --rdzv-endpoint="$ENDPOINT" --rdzv-conf="is_host=$((SLURM_PROCID == 0))" "$@"' \
    "$python" "${agent[@]}"
"""


@dataclass(frozen=True)
class Slurm:
    name: str = "slurm"

    @property
    def leads(self) -> bool:
        return True

    def script(self, job: Job) -> str:
        """What `sbatch` takes, and what runs inside an allocation as it is."""
        name = _job_name(job)
        lines = ["#!/usr/bin/env bash", *_directives(job, name), "set -euo pipefail"]
        given = environment()
        lines += [f"export {key}={shlex.quote(given[key])}" for key in EXPORTED]
        lines += [
            f"nodes={job.nnodes} ranks={job.nproc_per_node} name={name}",
            f"python={shlex.quote(sys.executable)}",
            f"agent=({shlex.join(_agent(job, name))})",
        ]
        return "\n".join(lines) + "\n" + BODY

    def run(self, job: Job) -> None:
        inside = _allocation(job)
        needed = "srun" if inside else "sbatch"
        if shutil.which(needed) is None:
            raise Unsupported(f"--launcher slurm: there is no {needed} on PATH")
        script = job.folder / "slurm.sh"
        script.write_text(self.script(job))
        log = _log(job) if inside else job.folder / "sbatch.log"
        command = ["bash"] if inside else ["sbatch", "--parsable", "--wait"]
        try:
            code = run_group([*command, str(script)], environment(), log) or 0
        except BaseException:
            _cancel(job, inside)
            raise
        if code:
            raise Unsupported(_what_failed(job, code, log))


def _directives(job: Job, name: str) -> list[str]:
    output = str(_log(job)).replace("%", "%%")  # sbatch expands %j and its kin
    asked = [
        f"--job-name={name}",
        f"--output={shlex.quote(output)}",
        f"--nodes={job.nnodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.nproc_per_node}",
    ]
    if any(trial.device == "cuda" for trial in job.trials):
        asked.append(f"--gpus-per-node={job.nproc_per_node}")
    return [f"#SBATCH {option}" for option in asked]


def _agent(job: Job, name: str) -> list[str]:
    return [
        f"--nnodes={job.nnodes}",
        f"--nproc-per-node={job.nproc_per_node}",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        f"--rdzv-id={name}",
        *("-m", "fsdp_migrate.verify.worker", str(job.file)),
    ]


def _job_name(job: Job) -> str:
    """One of its own for each launch, so that a job can be cancelled before its number is known."""
    return f"fsdp-migrate-{hashlib.sha256(str(job.folder).encode()).hexdigest()[:12]}"


def _log(job: Job) -> Path:
    return job.folder / "slurm.log"


def _allocation(job: Job) -> str | None:
    """The number of the job that this process runs in, if it does; it must be large enough."""
    number = os.environ.get("SLURM_JOB_ID")
    if number is None:
        return None
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes < job.nnodes:
        raise UsageError(f"--nnodes {job.nnodes}: the allocation (job {number}) has {nodes}")
    return number


def _cancel(job: Job, inside: str | None) -> None:
    """End the job, or the step of the allocation, and wait until Slurm no longer lists it."""
    name = _job_name(job)
    listing = ["squeue", "--noheader", "--format=%i %j"]
    listing += ["--steps", f"--jobs={inside}"] if inside else [f"--name={name}"]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        listed = subprocess.run(listing, capture_output=True, text=True, check=False).stdout
        ours = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
        if not ours:
            return
        subprocess.run(["scancel", *ours], capture_output=True, check=False)
        time.sleep(0.5)


def _what_failed(job: Job, code: int, log: Path) -> str:
    """The job's own output where there is any; else what sbatch said."""
    telling = _log(job) if _log(job).exists() else log
    return (
        f"the Slurm job could not run the ranks (exit code {code}); log: {telling}\n"
        f"{last_lines(telling)}"
    )
