"""
What every rank of a row runs: build, spread, train, and write one JSON file.

`python -m fsdp_migrate.verify.bench.rank SETUP.json ROW FOLDER` under torchrun. Every end, good or
bad, is told through the file `rank<N>.json`, so that the command can say why a row didn't run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
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


def main(setup_file: str, row_name: str, folder: str) -> NoReturn:
    setup = Setup.from_json(Path(setup_file).read_text())
    (row,) = named([row_name])
    try:
        record = measure(setup, row)
    except BaseException as error:
        traceback.print_exc()
        _leave(folder, {"status": _status(error), "reason": _reason(error)}, exit_code=1)
    dist.barrier()
    _leave(folder, record, exit_code=0)


def measure(setup: Setup, row: Row) -> dict[str, Any]:
    ranks = _ranks(setup)
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


def _ranks(setup: Setup) -> Ranks:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if setup.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Offloaded parameters live on the CPU even where the ranks have GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Ranks(device, rank, world_size, TORCH_DTYPES[setup.dtype])


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


def _leave(folder: str, record: dict[str, Any], *, exit_code: int) -> NoReturn:
    """
    Write the record whole, and end without tearing the process group down: gloo aborts in its
    destructor now and then, and a row that ran would be told as one that crashed.
    """
    file = Path(folder) / f"rank{os.environ['RANK']}.json"
    beside = file.with_suffix(".partial")
    beside.write_text(json.dumps({**record, "ended": time.time()}))
    beside.rename(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
