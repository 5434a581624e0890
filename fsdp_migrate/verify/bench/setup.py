"""What is benched: one model, one batch shape, one dtype, one number of ranks, for every row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_migrate.errors import UsageError

DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Setup:
    """
    The same for every row, so that rows differ in nothing but their parallelism.

    `batch` is sequences per rank. The global batch (`batch` times `ranks`) is the same in every
    row and is split over the data-parallel ranks, so a row whose ranks share their data (tensor
    parallel) gives each of them more sequences, and losses stay comparable.
    """

    hf_config: Path | None  # a folder with config.json; or
    factory: str | None  # MODULE:FUNCTION
    block: str | None  # class name of the modules sharded one by one; None: found
    vocab_size: int | None  # None: the model's own
    batch: int
    seq_len: int
    dtype: str
    steps: int
    warmup: int
    ranks: int
    device: str
    seed: int

    def __post_init__(self) -> None:
        if (self.hf_config is None) == (self.factory is None):
            raise UsageError(
                "name the model once: either --hf-config DIR or --model MODULE:FUNCTION"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise UsageError(f"--device {self.device}: expected one of {', '.join(DEVICES)}")
        for option in ("batch", "seq_len", "steps", "warmup", "ranks"):
            if getattr(self, option) < 1:
                raise UsageError(f"{option} is {getattr(self, option)}: at least 1 is needed")

    @property
    def global_batch(self) -> int:
        return self.batch * self.ranks

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len
