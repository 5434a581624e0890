"""
accelerate and the Hugging Face Trainer on CPU ranks.

On CPUs accelerate leaves FSDP out without a word and trains with DistributedDataParallel, in both
versions of a script. Here it takes the path it takes on GPUs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from fsdp_migrate.verify.capture.after_import import after_import
from fsdp_migrate.verify.capture.cuda_on_cpu import Redirect


def install(redirect: Redirect) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    after_import("accelerate.state", functools.partial(_state, redirect))
    after_import("accelerate.utils.dataclasses", _plugin)
    after_import("transformers.training_args", _training_arguments)


def _state(redirect: Redirect, module: Any) -> None:
    partial_state = module.PartialState.__init__

    @functools.wraps(partial_state)
    def partial_init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        del cpu
        kwargs.pop("backend", None)
        partial_state(self, cpu=True, **kwargs)

    state = module.AcceleratorState.__init__

    @functools.wraps(state)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        state(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        kind = module.DistributedType
        if plugin is not None and self.distributed_type == kind.MULTI_CPU:
            redirect.note("accelerate's FSDP, which it leaves out on CPUs")
            self.distributed_type = kind.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            module.PartialState._shared_state["distributed_type"] = kind.FSDP

    module.PartialState.__init__ = partial_init
    module.AcceleratorState.__init__ = init


def _plugin(module: Any) -> None:
    """The plugin asks for a device to materialise on; `current_device` is redirected."""
    settle = module.FullyShardedDataParallelPlugin.__post_init__

    @functools.wraps(settle)
    def post_init(self: Any) -> None:
        known = module.is_cuda_available
        module.is_cuda_available = lambda *_, **__: True
        try:
            settle(self)
        finally:
            module.is_cuda_available = known

    module.FullyShardedDataParallelPlugin.__post_init__ = post_init


def _training_arguments(module: Any) -> None:
    settle = module.TrainingArguments.__post_init__

    @functools.wraps(settle)
    def post_init(self: Any) -> None:
        self.use_cpu = True
        settle(self)

    module.TrainingArguments.__post_init__ = post_init
