"""
Run a training script as two or more real gloo ranks, and read back what it measured.

Importing torch costs seconds, and there are dozens of ranks to start: they are forked from one
server process (`multiprocessing`'s forkserver) that has torch loaded already. A rank sees what
torchrun would give it: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and a scratch folder
as its working directory.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 240


@dataclass(frozen=True)
class Optimizer:
    """What one optimizer held when it first stepped."""

    kind: str
    dtensors: int
    plain: int


@dataclass(frozen=True)
class Rank:
    """One rank of a finished run: the script's own metrics, and what really sharded the model."""

    metrics: tuple[dict[str, Any], ...]
    fsdp1_modules: int
    fsdp2_modules: int
    optimizers: tuple[Optimizer, ...]

    def series(self, key: str) -> list[float]:
        """Every recorded value of `key`, exactly: the scripts write floats as hex."""
        return [float.fromhex(line[key]) for line in self.metrics if key in line]


def run(script: Path, scratch: Path, *, args: Sequence[str] = (), world: int = 2) -> list[Rank]:
    """The ranks' results. Raises AssertionError with the ranks' output if one fails or hangs."""
    scratch.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rewrite.ranks_preload"])
    port = _free_port()
    ranks = [
        context.Process(target=_rank, args=(script, tuple(args), scratch, rank, world, port))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    _wait(ranks)
    codes = [process.exitcode for process in ranks]
    if any(codes):
        raise AssertionError(f"{script.name}: exit codes {codes}\n{_outputs(scratch, world)}")
    return [_read(scratch, rank) for rank in range(world)]


def _wait(ranks: Sequence[Any]) -> None:
    """Until all have ended. One failed rank leaves its peers waiting in a collective: end those."""
    waiting = {process.sentinel: process for process in ranks}
    while waiting:
        ended = multiprocessing.connection.wait(list(waiting), timeout=TIMEOUT_S)
        failed = not ended or any(waiting[sentinel].exitcode for sentinel in ended)
        for sentinel in ended:
            waiting.pop(sentinel)  # type: ignore[call-overload]
        if failed:
            for process in waiting.values():
                process.join(5)
                process.kill()
                process.join()
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _outputs(scratch: Path, world: int) -> str:
    logs = [scratch / f"rank{rank}.log" for rank in range(world)]
    return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs if log.exists())


def _read(scratch: Path, rank: int) -> Rank:
    lines = (scratch / "metrics" / f"rank{rank}.jsonl").read_text().splitlines()
    mechanism = json.loads((scratch / f"mechanism{rank}.json").read_text())
    return Rank(
        metrics=tuple(json.loads(line) for line in lines),
        fsdp1_modules=mechanism["fsdp1_modules"],
        fsdp2_modules=mechanism["fsdp2_modules"],
        optimizers=tuple(Optimizer(**found) for found in mechanism["optimizers"]),
    )


def _rank(
    script: Path, args: tuple[str, ...], scratch: Path, rank: int, world: int, port: int
) -> None:
    log = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (scratch / "metrics").mkdir(exist_ok=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "METRICS_DIR": str(scratch / "metrics"),
    }
    os.chdir(scratch)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    code = 1
    try:
        mechanism = _watch()
        runpy.run_path(str(script), run_name="__main__")
        Path(f"mechanism{rank}.json").write_text(json.dumps(mechanism))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads may abort an orderly exit after the work is done


def _watch() -> dict[str, Any]:
    """Look at every optimizer's parameters, and at all sharded modules, when it first steps."""
    import torch
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    torch.set_num_threads(1)
    # FSDP1 refuses sync_module_states for CPU parameters before it tries: gloo can broadcast them.
    _init_utils._check_module_states_for_sync_module_states = lambda *_: None

    found: dict[str, Any] = {"fsdp1_modules": 0, "fsdp2_modules": 0, "optimizers": []}
    seen: set[int] = set()

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        dtensors = sum(isinstance(p, DTensor) for p in parameters)
        found["optimizers"].append(
            {
                "kind": type(optimizer).__name__,
                "dtensors": dtensors,
                "plain": len(parameters) - dtensors,
            }
        )
        found["fsdp1_modules"] = _alive(FullyShardedDataParallel)
        found["fsdp2_modules"] = _alive(FSDPModule)

    register_optimizer_step_pre_hook(before_step)
    return found


def _alive(kind: type) -> int:
    return sum(issubclass(type(value), kind) for value in gc.get_objects())
