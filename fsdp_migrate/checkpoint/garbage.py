"""
Index and plan without the garbage collector.

A large checkpoint makes millions of objects that all live to the end of the run. None of them is
garbage, but the collector would visit them again and again, which doubles the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause collection; afterwards what was made is not visited by later ones either."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()
