"""
Process groups meet in a place of their own, and stay up until the process ends.

All trials of a launch use the agent's store, each under its own prefix.

gloo aborts one run in eight while it is torn down, after the training is long over. A rank is ended
from outside once it has said that it is done, so nothing has to be torn down.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp_migrate.verify.capture.patch import Patches


def install(patches: Patches, trial: str) -> None:
    # By name: `torch.distributed.rendezvous` is the function of that module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    create = rendezvous._create_c10d_store

    def own_store(*args: Any, **kwargs: Any) -> Any:
        return distributed_c10d.PrefixStore(f"fsdp_migrate/{trial}", create(*args, **kwargs))

    rendezvous._create_c10d_store = own_store  # type: ignore[attr-defined]

    def keep(destroy: Any) -> Any:
        def destroy_process_group(group: Any = None) -> None:
            """A script that goes on to start new groups still finds the way free."""
            if group is None:
                waiting.append(destroy)

        return destroy_process_group

    def reopen(init: Any) -> Any:
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            while waiting:
                waiting.pop()()
            init(*args, **kwargs)

        return init_process_group

    waiting: list[Any] = []
    for owner in (dist, distributed_c10d):
        patches.replace(owner, "destroy_process_group", keep)
        patches.replace(owner, "init_process_group", reopen)
