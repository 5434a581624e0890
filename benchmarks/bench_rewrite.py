"""
How fast `rewrite-code` is: 280 files of 100k lines that use FSDP1, as many that do not, start-up.

Prints wall times beside the bounds they are meant to keep; a bound that is broken is printed,
and is the exit status.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES, LINES = 280, 357
WRAPPING = """
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def build(model, rank):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block0})
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=rank,
    )
    return model


def save(model, path):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    torch.save(state, path)
"""
BLOCK = '''

class Block{number}(torch.nn.Module):
    """An ordinary layer, {number}."""

    def __init__(self, width: int, depth: int = {number}) -> None:
        super().__init__()
        self.width = width
        self.layers = [torch.nn.Linear(width, width) for _ in range(depth)]

    def forward(self, x, mask=None):
        for index, layer in enumerate(self.layers):
            if mask is not None and index % 2 == 0:
                x = x * mask[:, None] + layer(x).relu()
            else:
                x = x + torch.nn.functional.gelu(layer(x), approximate="tanh")
        return x.view(x.shape[0], -1, self.width).mean(dim=1)
'''


def file_text(head: str) -> str:
    text, number = head, 0
    while text.count("\n") < LINES - BLOCK.count("\n") // 2:
        text += BLOCK.format(number=number)
        number += 1
    return text


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "fsdp_migrate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - start


def main() -> int:
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, head in (("fsdp", WRAPPING), ("plain", "import torch\n")):
            (Path(folder) / name).mkdir()
            for number in range(FILES):
                (Path(folder) / name / f"file{number}.py").write_text(file_text(head))
        cases = (
            ("280 files with FSDP1, 100k lines, --jobs 2", 25.0, "fsdp", "2"),
            ("280 files without, 100k lines", 1.0, "plain", "1"),
        )
        for what, bound, name, jobs in cases:
            path = str(Path(folder) / name)
            taken = seconds("rewrite-code", path, "--jobs", jobs)
            broken += report(what, taken, bound)
    return broken + report("start (rewrite-code --help)", seconds("rewrite-code", "--help"), 0.3)


def report(what: str, taken: float, bound: float) -> int:
    kept = taken <= bound
    print(f"{what:48} {taken:7.2f} s   bound {bound:5.1f} s   {'' if kept else 'BROKEN'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(min(main(), 1))
