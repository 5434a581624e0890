"""Other libraries' classes of the same names, and a team's own: not one byte may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_migrate.rewrite import rewrite_files
from fsdp_migrate.rewrite.options import Options

FILES = sorted((Path(__file__).parent / "negative").glob("*.py"))


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_look_alikes_are_left_alone(path, unsafe):
    """Names decide nothing; where they are imported from does."""
    (result,) = rewrite_files([path], Options(unsafe=unsafe))

    assert result.error is None
    assert result.after == result.before
    assert [site for site in result.sites if site.state != "skipped"] == []


def test_all_of_them_in_one_run():
    """Files of one run are read together; what one imports must not leak into another."""
    results = rewrite_files([FILES[0].parent], Options())

    assert len(results) == len(FILES)
    assert [result.path for result in results if result.changed] == []
