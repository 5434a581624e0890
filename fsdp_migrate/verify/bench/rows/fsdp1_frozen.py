"""FSDP1 with the first half of the model frozen: only a frozen run is a fair reference for one."""

from __future__ import annotations

from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.rows.fsdp1 import parallelize

ROW = Row("fsdp1-frozen", "FSDP1, half frozen", parallelize, reference="fsdp1-frozen", freezes=True)
