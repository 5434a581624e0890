"""The torch target, and the archives below it, read by torch and by zip tools."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_migrate.checkpoint.index import Group, Index, Optimizer
from fsdp_migrate.checkpoint.tensors import Extent, Tensor
from fsdp_migrate.checkpoint.writers import TargetOptions
from fsdp_migrate.checkpoint.writers import torch as writer
from fsdp_migrate.checkpoint.writers.pickling import dumps
from fsdp_migrate.checkpoint.writers.torch_archive import Run, parts_of
from fsdp_migrate.errors import Unsupported
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
def values():
    return truth()


@pytest.fixture(scope="module")
def saved(values, tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    torch.save(values, folder / "truth.pt")
    index = index_of(folder / "source", values)
    write(writer.plan(index, TargetOptions()), folder / "full.pt")
    return folder


@pytest.mark.parametrize("mmap", [False, True])
def test_weights_only_load_gives_every_value_back(saved, values, mmap):
    """Also through mmap, which needs the storages aligned."""
    content = torch.load(saved / "full.pt", weights_only=True, mmap=mmap)

    assert list(content["model"]) == list(values["model"])
    for name, value in values["model"].items():
        assert torch.equal(content["model"][name], value)
    for name, entries in values["optim"].items():
        for key, value in entries.items():
            assert torch.equal(content["optim"]["state"][name][key], value)
    (group,) = content["optim"]["param_groups"]
    assert group["params"] == list(values["optim"])
    assert (group["betas"], group["foreach"]) == ((0.9, 0.95), None)


def test_tied_parameters_share_a_storage_and_steps_do_not(saved):
    """A tie costs its bytes once; a step that several parameters count on would count too fast."""
    content = torch.load(saved / "full.pt", weights_only=True)
    model, state = content["model"], content["optim"]["state"]

    assert model["head.weight"].data_ptr() == model["embed.weight"].data_ptr()
    assert len({entries["step"].data_ptr() for entries in state.values()}) == len(state)


def test_aliased_steps_are_written_apart(tmp_path):
    """FSDP1's flat optimizer gives all parameters of a unit one step."""
    step = store(tmp_path / "s", "step", torch.tensor(7.0))
    index = Index({}, Optimizer({"a": {"step": step}, "b": {"step": step}}, ()))
    content = torch.load(
        write(writer.plan(index, TargetOptions()), tmp_path / "o.pt"), weights_only=True
    )
    one, other = (content["optim"]["state"][name]["step"] for name in "ab")

    assert one == other == 7
    assert one.data_ptr() != other.data_ptr()


def test_zip_tools_find_nothing_wrong(saved):
    """The CRC-32 that was filled in after copying is right in both places."""
    with zipfile.ZipFile(saved / "full.pt") as archive:
        assert archive.testzip() is None
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", saved / "full.pt"], check=True, timeout=60)


def test_fsdp1_takes_it_back(saved):
    """FULL_STATE_DICT: load_state_dict and optim_state_dict_to_load of real FSDP1 on 2 ranks."""
    run_ranks(2, saved, "fsdp1=full.pt")


def test_only_parameters_are_cast(tmp_path, values):
    """Buffers, ints and optimizer state keep their dtype; the notes say what was done."""
    index = index_of(tmp_path / "source", values)
    plan = writer.plan(index, TargetOptions(dtype="bfloat16"))
    content = torch.load(write(plan, tmp_path / "o.pt"), weights_only=True)

    for name, value in values["model"].items():
        got = content["model"][name]
        buffer = name.startswith("bn.") and name.rpartition(".")[2] not in ("weight", "bias")
        assert torch.equal(got, value if buffer else value.bfloat16()), name
        assert got.dtype == (value.dtype if buffer else torch.bfloat16)
    assert content["optim"]["state"]["one"]["exp_avg"].dtype == torch.float32
    assert any("parameters cast from float32 to bfloat16" in note for note in plan.notes)
    assert any("not cast" in note and "bn.running_mean" in note for note in plan.notes)


def test_plain_steps_become_tensors(tmp_path):
    """torch before 1.12 kept step as a Python number; today's optimizers want a tensor."""
    index = Index({}, Optimizer({"a": {"step": 12}}, (Group(("a",), {"lr": 0.5}),)))
    plan = writer.plan(index, TargetOptions())
    content = torch.load(write(plan, tmp_path / "o.pt"), weights_only=True)
    step = content["optim"]["state"]["a"]["step"]

    assert (step.item(), step.dtype, step.shape) == (12.0, torch.float32, ())
    assert any("Python numbers" in note for note in plan.notes)


def test_what_lies_beside_is_named():
    """Nothing is dropped in silence."""
    index = Index({}, extras={("lr_scheduler", 0): 3, ("rng", 1): None})

    assert any("lr_scheduler, rng" in note for note in writer.plan(index, TargetOptions()).notes)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=40, deadline=None)
@given(examples=st.lists(st.tuples(NAMES, SHAPES), min_size=1, max_size=6), cuts=st.integers(1, 4))
def test_every_dtype_and_shape_survives(tmp_path_factory, examples, cuts):
    """0-dim, empty, 8-bit floats, unsigned ints: torch.load sees the same bytes."""
    folder = tmp_path_factory.mktemp("dtypes")
    values = {f"t{n}": example(*drawn) for n, drawn in enumerate(examples)}
    index = Index({name: store(folder, name, value, cuts) for name, value in values.items()})
    write(writer.plan(index, TargetOptions()), folder / "o.pt")
    content = torch.load(folder / "o.pt", weights_only=True)["model"]

    for name, value in values.items():
        assert content[name].dtype == value.dtype and content[name].shape == value.shape
        assert raw(content[name]) == raw(value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_survive_pickling(value):
    """Read by pickle itself, the types exactly the same."""
    assert repr(pickle.loads(dumps(value))) == repr(value)


def test_a_long_container_survives():
    """More items than one batch of opcodes holds, and more strings than one byte can number."""
    value = {str(n): [n] for n in range(3000)} | {"list": list(range(2500))}

    assert pickle.loads(dumps(value)) == value


def test_foreign_objects_are_refused():
    """Never a pickle of something that is not what it was."""
    with pytest.raises(Unsupported, match="PosixPath"):
        dumps({"a": Path("x")})


def test_members_of_four_gigabytes_use_zip64(tmp_path):
    """Sizes and offsets beyond 32 bits, read back by zipfile and by torch.load's mmap."""
    numel = (1 << 32) + 5
    big = Tensor("big", "uint8", (numel,), (Extent(0, numel, tmp_path / "none", 0),))
    runs = [Run(big, 0, numel, "uint8"), b"after" * 4]
    parts, size = parts_of(dumps(None), runs)
    path = tmp_path / "sparse.pt"
    with path.open("wb") as file:
        for part in parts:
            if hasattr(part, "data"):
                file.seek(part.offset)
                file.write(part.data)
        file.truncate(size)
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        assert infos["archive/data/0"].file_size == numel
        assert infos["archive/data/1"].header_offset > 1 << 32
        assert archive.read("archive/data/1") == b"after" * 4
    assert torch._C.PyTorchFileReader(str(path)).get_record("data/1") == b"after" * 4


def test_the_same_plan_twice_gives_the_same_bytes(tmp_path, values):
    """No time, no random number: outputs can be compared."""
    index = index_of(tmp_path / "source", values)
    one = write(writer.plan(index, TargetOptions()), tmp_path / "1.pt").read_bytes()

    assert write(writer.plan(index, TargetOptions()), tmp_path / "2.pt").read_bytes() == one
