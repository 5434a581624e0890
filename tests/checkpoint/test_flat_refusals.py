"""Layouts that are not the checkpoint's, and checkpoints that leave a choice, are refused."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_migrate.checkpoint.flat import unflatten
from fsdp_migrate.checkpoint.flat_layout import Evidence, Writer, lay_out, writer_of
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.model_layout import ModelLayout, Parameter
from fsdp_migrate.checkpoint.tensors import Extent, Tensor
from fsdp_migrate.errors import Incomplete, OpenQuestion, SourceError, Unsupported, UsageError
from tests.checkpoint.cases import Case, cases
from tests.checkpoint.local import layout_of, unflattened

LOCAL = list(cases("local_rank"))
PLAIN = [c for c in LOCAL if c.name in ("w2_full_block_flat", "w3_full_block_orig")]
ORIG = [c for c in PLAIN if c.settings["orig"]]

Change = Callable[[ModelLayout], ModelLayout]


def without(name: str) -> Change:
    return lambda layout: replace(layout, parameters=tuple(p for p in layout if p.name != name))


def shaped(name: str, shape: tuple[int, ...]) -> Change:
    return lambda layout: replace(
        layout, parameters=tuple(replace(p, shape=shape) if p.name == name else p for p in layout)
    )


def swapped(one: str, other: str) -> Change:
    def change(layout: ModelLayout) -> ModelLayout:
        shapes = {p.name: p.shape for p in layout}
        shapes[one], shapes[other] = shapes[other], shapes[one]
        return replace(layout, parameters=tuple(replace(p, shape=shapes[p.name]) for p in layout))

    return change


def moved(name: str, to: str) -> Change:
    return lambda layout: replace(
        layout, parameters=tuple(replace(p, name=to) if p.name == name else p for p in layout)
    )


WRONG = {
    "a parameter too few": without("model.layers.1.mlp.up_proj.weight"),
    "another hidden size": shaped("model.norm.weight", (24,)),
    "another vocabulary": shaped("lm_head.weight", (38, 20)),
    "a layer too few": lambda layout: replace(
        layout, parameters=tuple(p for p in layout if "layers.1." not in p.name)
    ),
    "a parameter of another unit": moved("model.norm.weight", "model.layers.1.norm.weight"),
    "a parameter too many": lambda layout: replace(
        layout, parameters=(*layout.parameters, Parameter("head.bias", (37,)))
    ),
    "a tie that is none": lambda layout: layout.tied(
        {"lm_head.weight": "model.embed_tokens.weight"}
    ),
}
WRONG_NAMES = {
    "two shapes swapped": swapped("model.odd", "model.conv"),
    "another name": moved("model.tiny", "model.little"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)
def test_a_wrong_model_is_refused(case: Case, wrong: str) -> None:
    with pytest.raises(Incomplete):
        unflattened(case, WRONG[wrong](layout_of(case.settings)))


@pytest.mark.parametrize("wrong", WRONG_NAMES)
@pytest.mark.parametrize("case", ORIG, ids=lambda case: case.id)
def test_original_names_catch_what_sizes_do_not(case: Case, wrong: str) -> None:
    """Rank files of use_orig_params=True show where each name begins."""
    with pytest.raises(Incomplete):
        unflattened(case, WRONG_NAMES[wrong](layout_of(case.settings)))


@pytest.mark.parametrize(
    "case",
    [c for c in LOCAL if c.settings.get("noncontig") and (2, 1) <= c.torch <= (2, 6)],
    ids=lambda case: case.id,
)
def test_the_order_of_a_transposed_parameter_is_asked_for(case: Case) -> None:
    """torch 2.6 changed it, and files of 2.1 to 2.6 look alike."""
    with pytest.raises(OpenQuestion, match=r"model\.nc is not contiguous"):
        unflattened(case, writer=writer_of(">=2.1"))


def flat_file(folder: Path, numbers: list[float]) -> Tensor:
    path = folder / "flat.bin"
    path.write_bytes(struct.pack(f"<{len(numbers)}f", *numbers))
    extent = Extent(0, len(numbers), path, 0)
    return Tensor("_flat_param", "float32", (len(numbers),), (extent,))


def small(*sizes: int) -> ModelLayout:
    return ModelLayout(tuple(Parameter(f"p{at}", (size,)) for at, size in enumerate(sizes)))


def solve(flat: Tensor, layout: ModelLayout, evidence: Evidence) -> dict[str, int]:
    with Gatherer() as gatherer:
        found = unflatten({"": flat}, layout, evidence, gatherer.read)
    return {p.parameter.name: p.start for p in found.units[0].placements}


def orig(layout: ModelLayout) -> Evidence:
    """Evidence of use_orig_params=True: an empty local piece under each name."""
    loose = {p.name: Tensor(p.name, "float32", (0,), ()) for p in layout}
    return Evidence(loose, world_size=16, writer=Writer(oldest=(2, 1)))


def test_two_alignments_that_fit_are_refused(tmp_path: Path) -> None:
    """Where parameters are 42 too, the padding does not tell alignments apart."""
    layout = small(3, 5)
    with pytest.raises(OpenQuestion, match="layouts of the root FSDP unit fit"):
        solve(flat_file(tmp_path, [42.0] * 16), layout, orig(layout))


@pytest.mark.parametrize(("align", "second"), [(4, 4), (8, 8)])
def test_padding_tells_alignments_apart(tmp_path: Path, align: int, second: int) -> None:
    numbers = [42.0] * 16
    numbers[0:3] = [1.0, 2.0, 3.0]
    numbers[second : second + 5] = [4.0, 5.0, 6.0, 7.0, 8.0]
    layout = small(3, 5)
    found = solve(flat_file(tmp_path, numbers), layout, orig(layout))
    assert found == {"p0": 0, "p1": second}
    assert lay_out("", layout.parameters, align, 16).numel == 16


def test_padding_that_is_not_42_is_refused(tmp_path: Path) -> None:
    layout = small(3, 5)
    with pytest.raises(Incomplete, match="alignment padding"):
        solve(flat_file(tmp_path, [0.0] * 16), layout, orig(layout))


def test_without_original_names_there_is_no_padding(tmp_path: Path) -> None:
    """use_orig_params=False never pads, so the 42s must be parameters."""
    with pytest.raises(Incomplete, match="16 elements"):
        solve(flat_file(tmp_path, [42.0] * 16), small(3, 5), Evidence(world_size=16))


def test_integers_have_no_padding_value(tmp_path: Path) -> None:
    flat = replace(flat_file(tmp_path, [42.0] * 16), dtype="int32")
    layout = small(3, 5)
    with pytest.raises(Unsupported, match="int32"):
        solve(flat, layout, orig(layout))


def test_strides_with_gaps_are_refused() -> None:
    with pytest.raises(SourceError, match="leave gaps"):
        Parameter("p", (4, 3), strides=(6, 1)).memory_order()


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((4, 3), (3, 1), None),
        ((4, 3), (1, 4), (1, 0)),
        ((1, 3), (1, 1), None),
        ((3, 1), (1, 7), None),
        ((2, 1, 3), (1, 9, 2), (1, 2, 0)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((0, 3), (1, 9), None),
        ((), (), None),
    ],
)
def test_memory_order(
    shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...] | None
) -> None:
    """None wherever memory and row-major order are the same."""
    assert Parameter("p", shape, strides).memory_order() == order


def test_a_version_that_the_file_rules_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"between 1\.13 and 2\.0"):
        writer_of("<=2.0", "2.6")
    with pytest.raises(UsageError, match="expected one like"):
        writer_of("", "two")
    assert writer_of(">=2.1", "2.3.1") == Writer((2, 3), (2, 3))
