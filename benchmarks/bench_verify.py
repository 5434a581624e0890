"""
What capture costs: the step time of a script under `verify`, over that of the script alone.

The same FSDP2 script runs twice in one launch of two gloo ranks on a model whose step takes over
100 ms, once as it is and once under capture. The script times its own steps, so both figures come
from the same clock; the ratio of medians is printed. Target: at most 1.1.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdp_migrate.verify.launchers.torchrun import Torchrun, environment
from fsdp_migrate.verify.trial import Job, Trial

WARM_UP, STEPS = 2, 8
SCRIPT = f"""
import json, os, sys, time, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
def block():
    wide, narrow = torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 512)
    return torch.nn.Sequential(wide, torch.nn.GELU(), narrow)
blocks = [block() for _ in range(3)]
model = torch.nn.Sequential(*blocks)
for block in blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
seconds = []
for step in range({WARM_UP + STEPS}):
    begun = time.perf_counter()
    model(torch.randn(512, 512)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - begun)
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as out:
        json.dump(seconds[{WARM_UP}:], out)
dist.barrier()
os._exit(0)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        bare, captured = [], []
        for index in range(2):  # interleaved, so that a busy machine slows both
            bare += _bare(script, folder / f"bare{index}.json")
            captured += _captured(script, folder / f"job{index}")
    one, other = statistics.median(bare), statistics.median(captured)
    print(f"bare step {one * 1e3:.0f} ms, captured step {other * 1e3:.0f} ms")
    print(f"verify capture / bare: {other / one:.3f} (target 1.1)")


def _bare(script: Path, out: Path) -> list[float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launch, str(script), str(out)], env=environment(), check=True)
    return list(json.loads(out.read_text()))


def _captured(script: Path, folder: Path) -> list[float]:
    trial = Trial("captured", script, ("seconds.json",), steps=WARM_UP + STEPS + 1)
    job = Job(folder, (trial,))
    job.folder.mkdir()
    job.write()
    Torchrun().run(job)
    return list(json.loads((folder / "captured" / "scratch" / "seconds.json").read_text()))


if __name__ == "__main__":
    main()
