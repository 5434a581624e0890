"""Run a script once a rank, as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT = 240  # seconds; ranks are slow to start on a busy machine


def run_script(script: str, world: int, folder: Path, *arguments: object) -> None:
    """`script RANK WORLD STORE FOLDER ARGUMENTS`; fails with what the ranks printed."""
    path = Path(__file__).with_name(script)
    store = folder / f"store-{script}-{'-'.join(map(str, arguments))}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(path.parents[2])}
    command = [sys.executable, "-W", "ignore", str(path)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store), str(folder), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [
        f"rank {rank}:\n{text}"
        for rank, text in enumerate(outputs)
        if processes[rank].returncode != 0
    ]
    assert not failed, "\n".join(failed)
