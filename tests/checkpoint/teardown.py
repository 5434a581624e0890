"""The end of a process that was a rank."""

import os
import sys

import torch.distributed as dist


def leave() -> None:
    """
    Exit with 0, once every rank has got here.

    Tearing gloo down in an orderly way aborts the process now and then, after all work is done.
    """
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
