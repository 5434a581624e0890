"""fsdp2.py, but rank 1 ends it: --how crash, exit, kill or stubborn (hangs, ignores SIGTERM), after two steps."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

how = sys.argv.pop()
sys.argv.pop()
made = 0


def after_two(*_: object) -> None:
    global made
    made += 1
    if made < 3 or os.environ["RANK"] != "1":
        return
    print("about to", how, flush=True)
    if how == "crash":
        raise RuntimeError("the planted crash")
    if how == "exit":
        sys.exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


step = torch.optim.AdamW.step
torch.optim.AdamW.step = lambda self, *args: after_two() or step(self, *args)
runpy.run_path(str(Path(__file__).with_name("fsdp2.py")), run_name="__main__")
