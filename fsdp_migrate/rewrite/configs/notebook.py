"""
Notebooks that use FSDP: named and left, since their cells run in an order that only the user knows.
"""

from __future__ import annotations

import re

from fsdp_migrate.rewrite.report import Site

RULE = "notebook"
USE = re.compile(r"torch\.distributed\.fsdp|FullyShardedDataParallel")


def sites(text: str, path: str) -> list[Site]:
    """One site a line that names FSDP1; lines are those of the JSON file."""
    message = "notebooks are not rewritten: export the code with nbconvert, or change it by hand"
    return [
        Site(path, number, "notebook", "skipped", RULE, message)
        for number, line in enumerate(text.splitlines(), start=1)
        if USE.search(line)
    ]
