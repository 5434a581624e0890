"""
Forge the DCP metadata of a 405B model with AdamW on 512 ranks: `forge_large.py FOLDER [RANKS]`.

1,140 tensors, each with two moments and a step: 1.75 million chunks. Only `.metadata` and the few
plain values are real; the data files have their true size and no content (sparse), because
indexing and planning must not read any.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.writers.dcp_metadata import (
    Entry,
    StoredChunk,
    StoredItem,
    StoredTensor,
    metadata,
)
from fsdp_migrate.checkpoint.writers.pickling import dumps
from fsdp_migrate.checkpoint.writers.torch_archive import Payload, parts_of

LAYERS, HIDDEN, INNER, VOCABULARY = 126, 16384, 53248, 128_256
OVERHEAD = 1600  # bytes of a torch archive around its one tensor


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    layer = {
        "attention_norm.weight": (HIDDEN,),
        "attention.wq.weight": (HIDDEN, HIDDEN),
        "attention.wk.weight": (HIDDEN // 16, HIDDEN),
        "attention.wv.weight": (HIDDEN // 16, HIDDEN),
        "attention.wo.weight": (HIDDEN, HIDDEN),
        "ffn_norm.weight": (HIDDEN,),
        "feed_forward.w1.weight": (INNER, HIDDEN),
        "feed_forward.w2.weight": (HIDDEN, INNER),
        "feed_forward.w3.weight": (INNER, HIDDEN),
    }
    yield "tok_embeddings.weight", (VOCABULARY, HIDDEN)
    for number in range(LAYERS):
        for name, shape in layer.items():
            yield f"layers.{number}.{name}", shape
    yield "norm.weight", (HIDDEN,)
    yield "output.weight", (VOCABULARY, HIDDEN)


class Files:
    """The data files of all ranks as they grow; rank 0's holds the plain values too."""

    def __init__(self, ranks: int) -> None:
        self.sizes = [0] * ranks
        self.values: list[tuple[int, bytes]] = []

    def chunk(self, rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...], item: int):  # type: ignore[no-untyped-def]
        length = math.prod(sizes) * item + OVERHEAD
        stored = StoredItem(f"__{rank}_0.distcp", self.sizes[rank], length)
        self.sizes[rank] += length
        return StoredChunk(offsets, sizes, stored)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> StoredTensor:
        item = DTYPES[dtype].bytes
        if not shape:
            return StoredTensor(dtype, (), [self.chunk(0, (), (), item)])
        ranks, rest = len(self.sizes), shape[1:]
        rows = -(-shape[0] // ranks)
        chunks = [
            self.chunk(
                rank, (start, *(0 for _ in rest)), (min(rows, shape[0] - start), *rest), item
            )
            for rank, start in enumerate(range(0, shape[0], rows))
        ]
        return StoredTensor(dtype, shape, chunks)

    def value(self, value: object) -> StoredItem:
        payloads: list[Payload] = []
        parts, size = parts_of(dumps(value), payloads)
        stored = StoredItem("__0_0.distcp", self.sizes[0], size)
        self.values += [(self.sizes[0] + part.offset, part.data) for part in parts]  # type: ignore[union-attr]
        self.sizes[0] += size
        return stored


def forge(folder: Path, ranks: int) -> int:
    """Returns the number of chunks."""
    files = Files(ranks)
    found: dict[tuple[str | int, ...], Entry] = {}
    names = [name for name, _ in shapes()]
    for name, shape in shapes():
        found["model", name] = files.tensor("bfloat16", shape)
    for name, shape in shapes():
        found["optim", "state", name, "step"] = files.tensor("float32", ())
        found["optim", "state", name, "exp_avg"] = files.tensor("float32", shape)
        found["optim", "state", name, "exp_avg_sq"] = files.tensor("float32", shape)
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": names}
    for key, value in options.items():
        found["optim", "param_groups", 0, key] = files.value(value)
    paths = {".".join(map(str, path)): path for path in found}
    content = metadata(dict(zip(paths, found.values(), strict=True)), paths)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(content)
    for rank, size in enumerate(files.sizes):
        fd = os.open(folder / f"__{rank}_0.distcp", os.O_WRONLY | os.O_CREAT)
        os.truncate(fd, size)
        for offset, data in files.values if rank == 0 else ():
            os.pwrite(fd, data, offset)
        os.close(fd)
    return sum(len(e.chunks) for e in found.values() if isinstance(e, StoredTensor))


if __name__ == "__main__":
    print(forge(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 512))
