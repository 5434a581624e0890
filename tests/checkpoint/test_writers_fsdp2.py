"""The fsdp2 target: files of DTensors, loaded by real FSDP2 jobs and compared with torch's own."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
import torch.distributed.tensor  # registers DTensor's classes for weights_only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_migrate.checkpoint.index import Group, Index, Optimizer
from fsdp_migrate.checkpoint.load import LoadOptions, load
from fsdp_migrate.checkpoint.writers import TargetOptions
from fsdp_migrate.checkpoint.writers import fsdp2 as writer
from fsdp_migrate.checkpoint.writers.installed import installed_torch
from fsdp_migrate.errors import Unsupported, UsageError
from tests.checkpoint.cases import cases, values
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
    """For 2, 3 and 2x1 ranks, for the torch that is installed."""
    folder = tmp_path_factory.mktemp("fsdp2")
    torch.save(truth(), folder / "truth.pt")
    index = index_of(folder / "source", truth())
    for name, options in (
        ("two", TargetOptions(ranks=2)),
        ("three", TargetOptions(ranks=3)),
        ("hsdp", TargetOptions(mesh=(2, 1))),
    ):
        write(writer.plan(index, options), folder / name)
    return folder


@pytest.mark.parametrize(
    ("world", "checks"), [(2, ("fsdp2=two", "fsdp2=hsdp:2x1")), (3, ("fsdp2=three",))]
)
def test_every_rank_loads_its_own_files(folder, world, checks):
    """load_state_dict of model and optimizer, then a step: same values, placements and meshes."""
    run_ranks(world, folder, *checks)


@pytest.mark.parametrize("name", ["two", "three", "hsdp"])
def test_our_own_reader_reads_them(folder, name):
    """And the output can be converted again."""
    index = load(folder / name, LoadOptions()).index

    for key, value in truth()["model"].items():
        assert torch.equal(values(index.model[key]), value)
    assert index.optimizer is not None
    for key, entries in truth()["optim"].items():
        for what, value in entries.items():
            assert torch.equal(values(index.optimizer.state[key][what]), value)


@pytest.mark.parametrize("version", ["2.6", "2.10", "2.13"])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 3), (3, 1)])
def test_our_own_reader_reads_every_form(tmp_path, version, mesh):
    """All three forms of the DeviceMesh, sides of 1 too."""
    value = torch.randn(7, 2)
    index = Index({"w": store(tmp_path / "s", "w", value)}, roles={"w": "parameter"})
    plan = writer.plan(index, TargetOptions(mesh=mesh, target_torch=version))
    found = load(write(plan, tmp_path / "o"), LoadOptions()).index

    assert torch.equal(values(found.model["w"]), value)


@pytest.mark.parametrize("version", ["2.6.0", "2.10.1", "2.13.0"])
def test_a_tie_shares_the_local_tensor(tmp_path, version):
    """Both names are there, as FSDP2's own state dict has them, over one storage."""
    index = index_of(tmp_path / "source", truth())
    plan = writer.plan(index, TargetOptions(ranks=2, target_torch=version))
    content = _tree(write(plan, tmp_path / "o") / "model_world_size_2_rank_1.pt")
    one, other = (_local(content[name]) for name in ("embed.weight", "head.weight"))

    assert one == other


REAL = [case for case in cases("dcp_get_state_dict") if case.name == "fsdp2_w3"]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("case", REAL, ids=lambda case: case.id)
def test_the_pickles_are_as_torch_writes_them(case, rank, tmp_path):
    """A real run's DCP, written as the rank files that the run saved too: same classes, fields."""
    version = case.path.parent.name
    options = TargetOptions(ranks=3, target_torch=version, device_type="cpu")
    index = load(case.path / "dcp_get_state_dict", LoadOptions()).index
    output = write(writer.plan(index, options), tmp_path / "o")

    for kind in ("model", "optim"):
        name = f"{kind}_world_size_3_rank_{rank}.pt"
        assert _shape_of(_tree(output / name)) == _shape_of(
            _tree(case.path / "sharded_rank" / name)
        )


HSDP = [
    case
    for case in cases("sharded_rank")
    if case.name == "w4_hybrid_block_orig_mesh" and case.torch >= (2, 6)
]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("case", HSDP, ids=lambda case: case.id)
def test_hsdp_pickles_are_as_torch_writes_them(case, rank, tmp_path):
    """FSDP1 over a 2x2 mesh saves the DTensors that FSDP2 would."""
    options = TargetOptions(
        mesh=(2, 2),
        target_torch=case.path.parent.name,
        device_type="cpu",
        mesh_dim_names=("dp", "fsdp"),
    )
    index = load(case.path / "sharded_rank", LoadOptions(with_optimizer=False)).index
    output = write(writer.plan(index, options), tmp_path / "o")
    name = f"model_world_size_4_rank_{rank}.pt"

    assert _shape_of(_tree(output / name)) == _shape_of(_tree(case.path / "sharded_rank" / name))


@settings(max_examples=25, deadline=None)
@given(
    drawn=st.lists(st.tuples(NAMES, SHAPES), min_size=1, max_size=5),
    ranks=st.integers(1, 9),
    version=st.sampled_from(["2.6", "2.13"]),
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_the_local_tensors_are_the_rows_of_each_rank(tmp_path_factory, drawn, ranks, version):
    """Any shape and dtype, any world size: torch.load(weights_only=True) and put together again."""
    folder = tmp_path_factory.mktemp("shapes")
    examples = {f"t{n}": example(*arguments) for n, arguments in enumerate(drawn)}
    index = Index({name: store(folder, name, value) for name, value in examples.items()})
    options = TargetOptions(ranks=ranks, target_torch=version)
    output = write(writer.plan(index, options), folder / "o")
    files = [
        torch.load(output / f"model_world_size_{ranks}_rank_{rank}.pt", weights_only=True)
        for rank in range(ranks)
    ]

    for name, value in examples.items():
        if not value.shape:
            assert all(raw(file[name]) == raw(value) for file in files)
            continue
        assert all(file[name].placements == (Shard(0),) for file in files)
        assert all(file[name].shape == value.shape for file in files)
        chunks = torch.arange(len(value)).chunk(ranks)
        lengths = [len(chunk) for chunk in chunks] + [0] * (ranks - len(chunks))
        locals_ = [file[name].to_local() for file in files]
        assert [len(local) for local in locals_] == lengths
        assert b"".join(map(raw, locals_)) == raw(value)


def test_hsdp_replicates_over_the_outer_side(tmp_path):
    """Mesh 2x3: ranks 1 and 4 hold the same rows, placed (Replicate, Shard(0))."""
    value = torch.randn(7, 2)
    index = Index({"w": store(tmp_path / "s", "w", value)})
    output = write(writer.plan(index, TargetOptions(mesh=(2, 3))), tmp_path / "o")
    one, other = (
        torch.load(output / f"model_world_size_6_rank_{rank}.pt", weights_only=True)["w"]
        for rank in (1, 4)
    )

    assert isinstance(one, DTensor)
    assert one.placements == other.placements == (Replicate(), Shard(0))
    assert torch.equal(one.to_local(), value[3:6]) and torch.equal(other.to_local(), value[3:6])


def test_ids_are_those_of_a_new_optimizer():
    """Group after group, each in the model's order, whatever the order of the source."""
    index = Index(dict.fromkeys("abcd"))  # type: ignore[arg-type]
    optimizer = Optimizer({}, (Group(("c", "a"), {}), Group(("d", "b"), {})))
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in "abcd"}
    groups = [{"params": [parameters[name] for name in names]} for names in ("ac", "bd")]
    real = torch.optim.AdamW(groups).state_dict()["param_groups"]

    ids = writer.numbered(index, optimizer)

    assert [[ids[name] for name in names] for names in ("ac", "bd")] == [
        group["params"] for group in real
    ]


def test_what_an_optimizer_file_cannot_say_is_refused(tmp_path):
    """State of a parameter that is in no group has no number."""
    state = {"w": {"exp_avg": store(tmp_path / "s", "x", torch.ones(2))}}
    index = Index({"w": store(tmp_path / "s", "w", torch.ones(2))}, Optimizer(state, ()))

    with pytest.raises(Unsupported, match="in none of its param groups"):
        writer.plan(index, TargetOptions(ranks=2))


def test_the_mesh_is_the_models(tmp_path):
    """Names and device type can be given; a mesh without names is what fully_shard makes itself."""
    index = Index({"w": store(tmp_path / "s", "w", torch.ones(4))}, roles={"w": "parameter"})
    for asked, written in ((("dp",), ("dp",)), ((), None), (None, ("fsdp",))):
        options = TargetOptions(ranks=2, mesh_dim_names=asked, device_type="cuda")
        plan = writer.plan(index, options)
        output = write(plan, tmp_path / f"{asked}")
        value = torch.load(output / "model_world_size_2_rank_0.pt", weights_only=True)["w"]
        assert value.device_mesh.mesh_dim_names == written
        assert value.device_mesh.device_type == "cuda"
        assert any("--mesh-names" in note for note in plan.notes)
    with pytest.raises(UsageError, match="2 mesh dimension names"):
        writer.plan(index, TargetOptions(ranks=2, mesh_dim_names=("a", "b")))


def test_it_asks_for_the_world_size():
    """Nothing can be cut without it, and files of torch 2.5 are not written."""
    with pytest.raises(UsageError, match="--ranks"):
        writer.plan(Index({}), TargetOptions())
    with pytest.raises(UsageError, match=r"2\.6 and later"):
        writer.plan(Index({}), TargetOptions(ranks=2, target_torch="2.5.1"))


def test_the_installed_torch_is_found_without_importing_it():
    """Its version and the devices it was built for."""
    device = "cuda" if torch.version.cuda or torch.version.hip else "cpu"

    assert installed_torch() == (torch.__version__, device)


class _Record:
    """Any class or function a pickle names, standing still."""

    def __new__(cls, *args):
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args):
        pass

    def __setstate__(self, state):
        self.state = state


def _tree(path):
    """A torch.save file's pickle, with nothing in it made real."""

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) == ("collections", "OrderedDict"):
                return OrderedDict
            return type(f"{module}.{name}", (_Record,), {})

        def persistent_load(self, pid):
            return pid

    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        with archive.open(name) as file:
            return Recorder(file).load()


def _local(dtensor):
    return dtensor.args[3][1]["_local_tensor"].args[0]


# Hashes are of one process; storage keys and the order of members are the writer's own affair; an
# attribute of later versions harms no earlier one.
_FREE = {"_hash", "_dim_group_names", "_preserve_rank_order", "_metadata"}


def _shape_of(value):
    """What must be equal: classes, arguments, fields, plain values; not keys of storages."""
    if isinstance(value, _Record):
        return type(value).__name__, _shape_of(value.args), _shape_of(value.state)
    if isinstance(value, dict):
        return {k: _shape_of(v) for k, v in value.items() if k not in _FREE}
    if isinstance(value, tuple) and len(value) == 5 and value[0] == "storage":
        return value[1].__name__  # torch pads the last shard's storage to the size of the others
    if isinstance(value, list | tuple):
        return [_shape_of(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else value.__name__
