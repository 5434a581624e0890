"""The dcp target, loaded by torch's own DCP into real FSDP2 models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fsdp_migrate.checkpoint.index import Group, Index, Optimizer
from fsdp_migrate.checkpoint.load import LoadOptions, load
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.writers import TargetOptions, dcp_link
from fsdp_migrate.checkpoint.writers import dcp as writer
from tests.checkpoint.cases import cases, equal
from tests.checkpoint.writer_contract import (
    NAMES,
    SHAPES,
    example,
    index_of,
    raw,
    run_ranks,
    store,
    truth,
    write,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every key style, once with chunks by size and once cut for 2 and 3 ranks."""
    folder = tmp_path_factory.mktemp("dcp")
    values = truth()
    torch.save(values, folder / "truth.pt")
    index = index_of(folder / "source", values)
    for keys in ("plain", "accelerate", "torchtitan"):
        for ranks in (None, 2, 3):
            plan = writer.plan(index, TargetOptions(keys=keys, ranks=ranks))
            write(plan, folder / f"{keys}-{ranks}")
    return folder


@pytest.mark.parametrize(("world", "cuts"), [(2, (None, 3)), (3, (2, 3))])
def test_real_fsdp2_loads_every_key_style(folder, world, cuts):
    """dcp.load gives back every value, whatever number of ranks it was cut for."""
    styles = ("plain", "accelerate", "torchtitan")

    run_ranks(world, folder, *(f"{keys}={keys}-{cut}" for keys in styles for cut in cuts))


def load_without_model(folder) -> dict:
    """Everything in a DCP directory, by torch's own reader, nested again."""
    content: dict = {}
    _load_state_dict(
        content,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return content


def reread(folder, style: str = "plain") -> tuple[dict, dict]:
    """Model and nested optimizer of a directory in a key style."""
    if style == "accelerate":
        model = load_without_model(folder / "pytorch_model_fsdp_0")["model"]
        return model, load_without_model(folder / "optimizer_0")["optimizer"]
    content = load_without_model(folder)
    return content["model"], content["optim"]


def linked(source, output, **options):
    """Convert a DCP directory over hard links; the plan and the output."""
    loaded = load(source, LoadOptions())
    index, options = loaded.index, TargetOptions(**options)
    originals = [
        value
        for part in (loaded.source.model, loaded.source.optimizer)
        if part is not None
        for value in part.contents.values.values()
        if isinstance(value, Tensor)
    ]
    assert dcp_link.obstacle(index, options, originals) is None
    plan = dcp_link.plan(index, options)
    return plan, write(plan, output)


@pytest.mark.parametrize("source", ["plain-3", "accelerate-3", "plain-None"])
@pytest.mark.parametrize("style", ["plain", "accelerate"])
def test_a_dcp_source_is_linked(folder, tmp_path, source, style):
    """Other names over the same files: no tensor byte is written, every value is there."""
    plan, output = linked(folder / source, tmp_path / "out", keys=style)
    model, optimizer = reread(output, style)
    values = torch.load(folder / "truth.pt", weights_only=True)

    for name, value in values["model"].items():
        assert torch.equal(model[name], value)
    for name, entries in values["optim"].items():
        for key, value in entries.items():
            assert torch.equal(optimizer["state"][name][key], value)
    assert optimizer["param_groups"][0]["params"] == list(values["optim"])
    assert not any(list(file.copies()) for file in plan.files)
    for carried in plan.carried:
        assert (output / carried.path).samefile(carried.source)


def test_copies_instead_of_links(folder, tmp_path):
    """--copy: files of their own, for those who change files in place."""
    plan, output = linked(folder / "plain-2", tmp_path / "out", copy=True)

    for carried in plan.carried:
        assert not (output / carried.path).samefile(carried.source)
        assert (output / carried.path).read_bytes() == carried.source.read_bytes()


def test_linking_says_what_stands_in_its_way(folder):
    """A cast, a cut and a source that is no DCP need the bytes to be written."""
    loaded = load(folder / "plain-2", LoadOptions())
    originals = [v for v in loaded.contents.values.values() if isinstance(v, Tensor)]
    obstacles = [
        dcp_link.obstacle(loaded.index, TargetOptions(dtype="bfloat16"), originals),
        dcp_link.obstacle(loaded.index, TargetOptions(ranks=4), originals),
        dcp_link.obstacle(index_of(folder / "source", truth()), TargetOptions(), originals),
    ]

    assert ["cast to bfloat16" in obstacles[0], "4 ranks" in obstacles[1]] == [True, True]
    assert "does not come from a DCP" in obstacles[2]


REAL = [
    (case, part)
    for part in ("sharded_dcp_old", "sharded_dcp_new", "dcp_get_state_dict")
    for case in cases(part)
    if case.torch >= (2, 0)  # 1.13 lost all ranks' shards but rank 0's
]


@pytest.mark.parametrize(("case", "part"), REAL, ids=[f"{case.id}-{part}" for case, part in REAL])
def test_real_directories_are_linked(case, part, tmp_path):
    """What FSDP1 of every version saved is read by this torch after linking, 2.15's too."""
    _, output = linked(case.path / part, tmp_path / "out")
    model, optimizer = reread(output)

    for name, value in case.truth["params"].items():
        assert equal(model[name], value)
    for name, entries in case.truth["optim"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert equal(optimizer["state"][name][key], entries[key])
        assert optimizer["state"][name]["step"] == entries["step"]
    assert optimizer["param_groups"][0]["decoupled_weight_decay"] in (False, True)


def test_missing_options_are_filled_and_said(folder):
    """decoupled_weight_decay as torch's own __setstate__ has it; others are left alone."""
    values = truth()
    index = index_of(folder / "source", values)
    notes = writer.plan(index, TargetOptions()).notes
    group = Group(("one",), {"lr": 0.1, "momentum_of_mine": 0.9})
    other = Index(index.model, Optimizer({}, (group,)))

    assert any("decoupled_weight_decay filled in" in note for note in notes)
    assert any("no option was filled in" in n for n in writer.plan(other, TargetOptions()).notes)


def test_rows_are_dealt_as_torch_chunk_does():
    """Against torch.chunk itself, for all small sizes; ranks left over share one empty chunk."""
    for rows in range(13):
        for ranks in range(1, 10):
            dealt = list(writer.rows_by_rank(rows, ranks))
            chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
            if not rows:
                chunks = [0]
            elif len(chunks) < ranks:
                chunks.append(0)
            assert [stop - start for start, stop in dealt] == chunks
            assert dealt[0][0] == 0 and dealt[-1][1] == rows


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=25, deadline=None)
@given(
    examples=st.lists(st.tuples(NAMES, SHAPES), min_size=1, max_size=6),
    ranks=st.none() | st.integers(1, 9),
)
def test_every_dtype_and_shape_survives(tmp_path_factory, examples, ranks):
    """Any world size, 0-dim and empty tensors, all dtypes: DCP's own reader sees the same bytes."""
    folder = tmp_path_factory.mktemp("dtypes")
    values = {f"t{n}": example(*drawn) for n, drawn in enumerate(examples)}
    index = Index({name: store(folder, name, value) for name, value in values.items()})
    output = write(writer.plan(index, TargetOptions(ranks=ranks)), folder / "o")
    loaded = load_without_model(output)["model"]

    for name, value in values.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert raw(loaded[name]) == raw(value)


def test_chunks_and_files_have_bounded_sizes(monkeypatch, tmp_path):
    """Without --ranks a big tensor is cut by rows, and files end when they are long enough."""
    monkeypatch.setattr(writer, "CHUNK", 100)
    monkeypatch.setattr(writer, "FILE", 5000)
    value = torch.randn(50, 3)
    index = Index({"w": store(tmp_path / "s", "w", value)})
    output = write(writer.plan(index, TargetOptions()), tmp_path / "o")

    assert len(list(output.glob("*.distcp"))) > 1
    assert torch.equal(load_without_model(output)["model"]["w"], value)
