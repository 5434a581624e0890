"""The one exception of the rules."""

from __future__ import annotations


class Undecided(Exception):
    """What a rule would need to know; its text goes into the marker."""
