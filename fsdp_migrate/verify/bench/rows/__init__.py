"""The rows of the table, one module each, in the order they run and are shown."""

from fsdp_migrate.errors import UsageError
from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.rows import (
    ddp,
    fsdp1,
    fsdp1_frozen,
    fsdp2,
    fsdp2_compile,
    fsdp2_frozen,
    fsdp2_no_reshard,
    fsdp2_offload,
    fsdp2_tp,
    hsdp,
)

ROWS: tuple[Row, ...] = (
    ddp.ROW,
    fsdp1.ROW,
    fsdp2.ROW,
    fsdp2_no_reshard.ROW,
    fsdp2_compile.ROW,
    fsdp2_tp.ROW,
    hsdp.ROW,
    fsdp2_offload.ROW,
    fsdp1_frozen.ROW,  # what the next row is held against
    fsdp2_frozen.ROW,
)


def named(names: list[str]) -> tuple[Row, ...]:
    """The rows of these names, in the table's order."""
    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            raise UsageError(f"--rows {name}: no such row; there are {', '.join(known)}")
    return tuple(row for row in ROWS if row.name in names)
