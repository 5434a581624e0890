"""
Floating point operations of one training step, counted on fake tensors: no memory, no arithmetic.

The count is of the unspread model's mathematics, forward and backward: matrix products
(attention's included, in full, as if it were not causal) and no recomputation, which is how model
FLOPs are counted where MFU is compared. A frozen part has no weight gradients and counts less.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_migrate.verify.bench.blocks import freeze_first_half
from fsdp_migrate.verify.bench.models import Model
from fsdp_migrate.verify.bench.setup import Setup


def per_token(source: Model, setup: Setup, *, frozen: bool) -> float:
    """FLOPs per token of one sequence of `setup.seq_len`, forward and backward."""
    rng = torch.Generator().manual_seed(setup.seed)
    counter = FlopCounterMode(display=False)
    # The counter knows no fused attention of the CPU; the plain one is made of matrix products.
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        model = source.build()
        if frozen:
            freeze_first_half(model, setup.block)
        batch = source.batch(model, 1, setup.seq_len, rng)
        with counter:
            torch.autograd.backward(source.loss(model, batch))
    return counter.get_total_flops() / setup.seq_len
