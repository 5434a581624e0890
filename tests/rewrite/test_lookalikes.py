"""Names that look like FSDP1's and are not."""

from __future__ import annotations

import pytest

from fsdp_migrate.rewrite import rewrite_source

BODY = """

model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=dtype))
with model.no_sync():
    model.clip_grad_norm_(1.0)
with FSDP.state_dict_type(model, "full"):
    state = model.state_dict()
assert isinstance(model, FSDP)
"""
HOMES = {
    "fairscale": "from fairscale.nn import FullyShardedDataParallel as FSDP, MixedPrecision",
    "fairscale path": "from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP",
    "xla": "from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP",
    "lightning": "from lightning.pytorch.strategies import FSDPStrategy as FSDP",
    "sagemaker": "from smp.torch.fsdp import FullyShardedDataParallel as FSDP",
    "accelerate": "from accelerate import FullyShardedDataParallelPlugin as FSDP",
    "own class": "class FSDP:\n    pass",
    "own module": "from .fsdp import FullyShardedDataParallel as FSDP",
    "parameter": "def f(FSDP, model):\n    return FSDP(model)",
    "DDP": "from torch.nn.parallel import DistributedDataParallel as FSDP",
}


@pytest.mark.parametrize("home", HOMES)
def test_is_left_alone(home: str) -> None:
    """Only the import decides: not a byte of these files changes, and nothing is claimed."""
    text = HOMES[home] + BODY

    result = rewrite_source(text)

    assert result.after == text
    assert result.sites == ()


def test_a_choice_between_two_homes_is_not_ours_to_make() -> None:
    """A file that takes fairscale's class or torch's, as it finds them, is left."""
    text = (
        "try:\n"
        "    from fairscale.nn import FullyShardedDataParallel as FSDP\n"
        "except ImportError:\n"
        "    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "model = FSDP(model)\n"
    )

    assert rewrite_source(text).after == text


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed.fsdp as F\nm = F.FullyShardedDataParallel(m)\n",
        "import torch.distributed.fsdp\nm = torch.distributed.fsdp.FullyShardedDataParallel(m)\n",
        "from torch.distributed import fsdp\nm = fsdp.FullyShardedDataParallel(module=m)\n",
        "from torch.distributed.fsdp import *\nm = FullyShardedDataParallel(m)\n",
        "from torch.distributed.fsdp.fully_sharded_data_parallel import (\n"
        "    FullyShardedDataParallel as X,\n)\nm = X(m)\n",
    ],
)
def test_every_spelling_of_the_import_is_known(text: str) -> None:
    """Aliases, dotted paths, old homes and stars lead to the same class."""
    after = rewrite_source(text).after

    assert "fully_shard(m)" in after
    assert "FullyShardedDataParallel(" not in after
