"""FSDP2 with the first half of the model frozen."""

from __future__ import annotations

from fsdp_migrate.verify.bench.row import Row
from fsdp_migrate.verify.bench.rows.fsdp2 import parallelize

ROW = Row("fsdp2-frozen", "FSDP2, half frozen", parallelize, reference="fsdp1-frozen", freezes=True)
