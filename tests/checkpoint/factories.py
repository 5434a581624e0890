"""The fixtures' model with each of its switches, as `--model` wants: callable, no arguments."""

from functools import partial

import torch

from tests.checkpoint.tiny_model import Tiny

plain = Tiny
tied = partial(Tiny, tied=True)
gate = partial(Tiny, gate=True)
noncontig = partial(Tiny, noncontig=True)
frozen = partial(Tiny, frozen="some")
frozen_block = partial(Tiny, frozen="layer0")


def groups() -> tuple[Tiny, torch.optim.Optimizer]:
    """Weight decay for some parameters only, as the run with two param groups had it."""
    model = Tiny()
    plain, decayed = [], []
    for name, parameter in model.named_parameters():
        (plain if name.endswith("bias") or "norm" in name else decayed).append(parameter)
    both = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(both)
