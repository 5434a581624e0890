"""
A real Slurm of two nodes on this one machine, as root, for as long as it is needed.

All daemons are children in the foreground: nothing is daemonised, no service manager and no
cgroup is involved, ports are free ones, and all files are in one folder. The two nodes are two
`slurmd` under different node names. By hand: `python -m tests.verify.slurm_cluster FOLDER`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NODES = ("n1", "n2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")


def missing() -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (Debian: slurm-wlm munge)" if absent else None


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment variables under which Slurm's commands find the cluster; then its end."""
    for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True, mode=0o700)
    conf = folder / "slurm.conf"
    conf.write_text(_configuration(folder))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(_munged(folder), env, folder / "munged.log"))
        _wait(lambda: (folder / "munge" / "socket").exists(), "munged made no socket", folder)
        controller = ["slurmctld", "-D", "-c", "-f", str(conf)]
        daemons.enter_context(_daemon(controller, env, folder / "slurmctld.log"))
        for node in NODES:
            command = ["slurmd", "-D", "-N", node, "-f", str(conf)]
            daemons.enter_context(_daemon(command, env, folder / f"slurmd.{node}.log"))
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        _wait(lambda: _output(idle, env) == str(len(NODES)), "the nodes did not come up", folder)
        yield {"SLURM_CONF": str(conf)}
        subprocess.run(["scancel", "--user=root"], env=env, check=False)
        _wait(lambda: not _output(["squeue", "--noheader"], env), "jobs did not end", folder)


def _munged(folder: Path) -> list[str]:
    """With a key and a socket of its own; --force accepts a folder below a world-writable one."""
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"key-file": key, "socket": folder / "munge" / "socket"}
    files |= {name: folder / "munge" / name for name in ("pid-file", "log-file", "seed-file")}
    return ["munged", "--foreground", "--force", *(f"--{n}={path}" for n, path in files.items())]


def _configuration(folder: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    cores = os.cpu_count() or 1
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder / 'munge' / 'socket'}",
        "CredType=cred/munge",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "ReturnToService=2",
        "KillWait=5",
        "SlurmdParameters=config_overrides",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores}"
            for node, port in zip(NODES, ports, strict=True)
        ),
        f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=30 State=UP",
    ]
    return "\n".join(lines) + "\n"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _daemon(command: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _output(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _wait(ready: object, complaint: str, folder: Path) -> None:
    deadline = time.monotonic() + 60
    assert callable(ready)
    while not ready():
        if time.monotonic() > deadline:
            logs = "\n".join(p.read_text(errors="replace")[-800:] for p in folder.glob("*.log"))
            raise RuntimeError(f"{complaint}:\n{logs}")
        time.sleep(0.2)


if __name__ == "__main__":
    with cluster(Path(sys.argv[1]).resolve()) as found:
        print(*(f"export {name}={value}" for name, value in found.items()), sep="\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(3600)
