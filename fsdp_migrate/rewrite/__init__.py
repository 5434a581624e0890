"""
Rewrite FSDP1 training code for FSDP2. Needs no torch and runs nothing of the user's.

    rewrite_files(paths, options)   files and folders, together, each with its sites
    rewrite_source(text, options)   one module's text
"""

from __future__ import annotations

from fsdp_migrate.rewrite.engine import rewrite_source
from fsdp_migrate.rewrite.options import Options, State
from fsdp_migrate.rewrite.report import Result, Site, totals
from fsdp_migrate.rewrite.session import rewrite_files

__all__ = ["Options", "Result", "Site", "State", "rewrite_files", "rewrite_source", "totals"]
