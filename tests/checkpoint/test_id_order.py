"""Dealing parameters out to ids, against trying every way."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_migrate.checkpoint.id_order import assignments
from fsdp_migrate.errors import OpenQuestion

Sized = tuple[str, int, bool]  # name, size, optional


def every_way(
    slots: list[Sized], groups: list[list[int]], sizes: list[int]
) -> list[dict[int, str]]:
    """All that are right, the slow way."""
    ids = [number for group in groups for number in group]
    found = []
    for chosen in permutations(range(len(slots)), len(ids)):
        dealt = dict(zip(ids, chosen, strict=True))
        in_order = all(dealt[one] < dealt[two] for group in groups for one, two in pairwise(group))
        sized = all(slots[at][1] == sizes[number] for number, at in dealt.items())
        used = all(optional or at in chosen for at, (_, _, optional) in enumerate(slots))
        if in_order and sized and used:
            found.append({number: slots[at][0] for number, at in dealt.items()})
    return found


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=6),
    st.lists(st.integers(1, 3), max_size=6),
    st.integers(0, 6),
)
@settings(max_examples=300, deadline=None)
def test_the_ways_are_those_that_trying_all_finds(
    drawn: list[tuple[int, bool]], sizes: list[int], cut: int
) -> None:
    """None, the only one, or two of many."""
    slots = [(f"p{at}", size, optional) for at, (size, optional) in enumerate(drawn)]
    ids = list(range(len(sizes)))
    groups = [ids[:cut], ids[cut:]]
    expected = every_way(slots, groups, sizes)
    found = assignments(
        slots, groups, lambda slot, number: slot[1] == sizes[number], lambda slot: slot[2]
    )
    named = [{number: slot[0] for number, slot in way.items()} for way in found]
    assert len(named) == min(len(expected), 2)
    assert all(way in expected for way in named)
    assert len(named) < 2 or named[0] != named[1]


def test_too_many_ways_are_refused() -> None:
    """Four groups that could be dealt out anyhow."""
    groups = [list(range(at * 40, at * 40 + 40)) for at in range(4)]
    with pytest.raises(OpenQuestion, match="too many ways"):
        assignments(list(range(160)), groups, lambda *_: True, lambda _: False)
