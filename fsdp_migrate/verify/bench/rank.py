"""
What every rank of a row runs: build, spread, train, and write one JSON file.

Every end, good or bad, is told through the file `rank<N>.json`, so that the command can say why a
row didn't run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_migrate.errors import Unsupported
from fsdp_migrate.verify.bench import flops, training
from fsdp_migrate.verify.bench.blocks import blocks_of, freeze_first_half
from fsdp_migrate.verify.bench.models import model_of
from fsdp_migrate.verify.bench.row import Ranks, Row
from fsdp_migrate.verify.bench.rows import named
from fsdp_migrate.verify.bench.setup import Setup

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(setup: Setup, row_name: str, folder: Path, log: Path, place: int, port: int) -> NoReturn:
    """The whole life of rank `place`; the other ranks are met at the store on `port`."""
    _settle(setup, log, place)
    file = folder / f"rank{place}.json"
    (row,) = named([row_name])
    try:
        record = measure(setup, row, _join(setup, place, port))
        dist.barrier()
    except BaseException as error:
        traceback.print_exc()
        _leave(file, {"status": _status(error), "reason": _reason(error)}, exit_code=1)
    _leave(file, record, exit_code=0)


def _settle(setup: Setup, log: Path, place: int) -> None:
    """In a process group of its own, with its output in the log; it ends when the command does."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_command, daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    numbers = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": setup.ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // setup.ranks))


def _end_with_command() -> None:
    """
    However the command ends: killed, or interrupted before it knew of this rank.

    The server that this process was forked from can't tell: it lives as long as any rank does.
    """
    command = multiprocessing.parent_process()
    assert command is not None
    connection.wait([command.sentinel])
    os.killpg(0, signal.SIGKILL)


def _join(setup: Setup, place: int, port: int) -> Ranks:
    device = torch.device("cpu")
    if setup.device == "cuda":
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    # Offloaded parameters live on the CPU even where the ranks have GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False
    )
    dist.init_process_group(backend, store=store, rank=place, world_size=setup.ranks)
    return Ranks(device, place, setup.ranks, TORCH_DTYPES[setup.dtype])


def measure(setup: Setup, row: Row, ranks: Ranks) -> dict[str, Any]:
    source = model_of(setup)
    torch.manual_seed(setup.seed)
    # Every row keeps fp32 weights and casts as it computes, whatever the source says.
    whole = source.build().float().train()
    blocks = blocks_of(whole, setup.block)
    if row.freezes:
        freeze_first_half(whole, setup.block)
    model = row.parallelize(whole, blocks, ranks)
    torch.manual_seed(setup.seed + ranks.rank // row.sharing)  # dropout, the same in every row
    measured = training.train(model, whole, source, setup, row, ranks)
    counted = _flops(source, setup, row) if ranks.rank == 0 else {}
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    return {"status": "ran", "device": device, **asdict(measured), **counted}


def _flops(source: Any, setup: Setup, row: Row) -> dict[str, Any]:
    try:
        counted = flops.per_token(source, setup, frozen=row.freezes)
    except Exception as error:  # the user's model may not run on the meta device: MFU is n/a then
        return {"flops_per_token": None, "flops_reason": _reason(error)}
    return {"flops_per_token": counted, "flops_reason": None}


def _status(error: BaseException) -> str:
    if isinstance(error, Unsupported):
        return "cannot run"
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "out of memory"
    return "failed"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"


def _leave(file: Path, record: dict[str, Any], *, exit_code: int) -> NoReturn:
    """
    Write the record whole, and end without tearing the process group down: gloo aborts in its
    destructor now and then, and a row that ran would be told as one that crashed.
    """
    beside = file.with_suffix(".partial")
    beside.write_text(json.dumps({**record, "ended": time.time()}))
    beside.rename(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
