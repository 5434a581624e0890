"""Where elements lie: interval arithmetic held against doing it one element at a time."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.tensors import Extent, Tensor, boxes_of_run, piece, row_major
from fsdp_migrate.errors import Incomplete

many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def gridded(draw, cuts: bool = True):
    """A shape, and boxes (offsets, sizes) that tile it: each dimension cut anywhere."""
    shape = draw(shapes)
    spans = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=3)) if cuts else set()
        edges = sorted({0, size, *(cut for cut in inner if cut < size)})
        spans.append(list(pairwise(edges)) or [(0, 0)])
    boxes = [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in product(*spans)
    ]
    return shape, boxes


def stored(draw, path: Path, values: np.ndarray, boxes) -> Tensor:
    """Every box in the file at a place of its own, its dimensions in any order."""
    data, pieces = bytearray(b"??"), []
    for offsets, sizes in draw(st.permutations(boxes)):
        part = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        order = draw(st.permutations(range(part.ndim)))
        turned = np.ascontiguousarray(part.transpose(order))
        strides = [0] * part.ndim
        for position, dim in enumerate(order):
            strides[dim] = row_major(turned.shape)[position]
        pieces.append(piece(values.shape, offsets, sizes, tuple(strides), path, len(data)))
        data += turned.tobytes() + b"junk"[: draw(st.integers(0, 4))]
    path.write_bytes(data)
    return Tensor("t", "int32", values.shape, tuple(pieces))


@many
@given(st.data())
def test_any_tiling_in_any_memory_order_gives_every_run_of_elements(tmp_path, data) -> None:
    """Column shards, transposed storages, grids of both: read like one array."""
    shape, boxes = data.draw(gridded())
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    tensor = stored(data.draw, tmp_path / "file", values, boxes)
    start = data.draw(st.integers(0, tensor.numel))
    stop = data.draw(st.integers(start, tensor.numel))

    with Gatherer() as gatherer:
        assert gatherer.read(tensor) == values.tobytes()
        assert gatherer.read(tensor, start, stop) == values.reshape(-1)[start:stop].tobytes()


@many
@given(st.data())
def test_a_tiling_with_a_tile_missing_or_twice_is_no_tensor(data) -> None:
    """However the tiles lie, and wherever the fault is."""
    shape, boxes = data.draw(gridded())
    full = [box for box in boxes if 0 not in box[1]]
    assume(full)
    odd = data.draw(st.sampled_from(full))
    faulty = [box for box in boxes if box != odd] if data.draw(st.booleans()) else [*boxes, odd]
    path = Path("file")
    pieces = tuple(piece(shape, o, s, row_major(s), path, 0) for o, s in faulty)

    with pytest.raises(Incomplete, match=r"missing|twice|stored"):
        Tensor("t", "int32", shape, pieces)


@many
@given(st.integers(0, 60), st.sets(st.integers(1, 59), max_size=8), st.data())
def test_between_is_a_slice(numel, cuts, data) -> None:
    """Extents trimmed to a run are those elements, each at its byte."""
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    extents = [Extent(low, high, Path(f"f{low}"), 1000 * low) for low, high in pairwise(edges)]
    tensor = Tensor("t", "int16", (numel,), tuple(data.draw(st.permutations(extents))))
    where = [
        (extent.store, extent.offset + 2 * at)
        for extent in extents
        for at in range(extent.stop - extent.start)
    ]
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))

    found = [
        (extent.store, extent.offset + 2 * at)
        for extent in tensor.between(start, stop)
        for at in range(extent.stop - extent.start)
    ]
    assert found == where[start:stop]


@many
@given(shapes, st.data())
def test_a_run_is_few_boxes_that_hold_exactly_its_elements(shape, data) -> None:
    """In order, and at most two a dimension, less one."""
    numel = int(np.prod(shape))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = np.arange(numel).reshape(shape)

    boxes = list(boxes_of_run(start, stop, shape))
    held = [
        numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in boxes
    ]
    assert [n for part in held for n in part.tolist()] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@many
@given(st.data())
def test_a_wrong_shape_is_no_tensor(data) -> None:
    """One element more or fewer than is stored."""
    numel = data.draw(st.integers(0, 30))
    other = data.draw(st.integers(0, 30).filter(lambda n: n != numel))

    with pytest.raises(Incomplete):
        Tensor("t", "int32", (other,), (Extent(0, numel, Path("f"), 0),))
