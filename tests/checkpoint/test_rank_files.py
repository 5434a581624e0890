"""Rank files beside the fixtures: other names, many ranks, every placement, replicas."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from fsdp_migrate.checkpoint.load import LoadOptions, load
from tests.checkpoint.cases import ROOT, equal, values
from tests.checkpoint.command import converted, refused, run
from tests.checkpoint.ranks import run_script

OPTIONS = LoadOptions()


@pytest.fixture(scope="module")
def meshes(tmp_path_factory) -> Path:
    """What four real ranks saved, with storage tags, placements and a mesh type of GPUs."""
    folder = tmp_path_factory.mktemp("meshes")
    run_script("mesh_ranks.py", 4, folder)
    return folder


@pytest.mark.parametrize("name", ["placed", "strided", "columns", "hsdp"])
def test_every_placement_gives_the_full_tensor(meshes, name) -> None:
    """`Shard` of any dimension, `_StridedShard`, `Replicate`, on 2-D meshes and uneven sizes."""
    truth = torch.load(meshes / f"{name}-truth.pt", weights_only=True)

    index = load(meshes / name, OPTIONS).index
    assert set(index.model) == set(truth)
    assert [n for n, t in index.model.items() if not equal(values(t), truth[n])] == []


def test_sharded_tensors_of_gpus_are_read_without_one(meshes) -> None:
    """Placements `rank:3/cuda:3`, storages `cuda:3`, and a rank without rows."""
    assert b"cuda:2" in (meshes / "sharded" / "model_world_size_4_rank_2.pt").read_bytes()
    torch.manual_seed(3)

    index = load(meshes / "sharded", OPTIONS).index
    assert equal(values(index.model["a"]), torch.randn(9, 2))


@pytest.mark.parametrize("to", ["dcp", "hf", "torch"])
def test_column_shards_reach_every_target(meshes, tmp_path, to) -> None:
    """They cannot be copied as runs of bytes."""
    converted(meshes / "placed", tmp_path / "out", to)
    outcome = run("compare-ckpt", meshes / "placed", tmp_path / "out")
    assert outcome.code == 0, outcome.out


def damaged(source: Path, target: Path, rank: int, name: str) -> Path:
    """`source` with the first byte of one rank's copy of `name` changed; its file says so."""
    shutil.copytree(source, target)
    path = next(target.glob(f"*model*rank_{rank}.pt"))
    tree = torch.load(path, weights_only=False, map_location="cpu")
    value = tree[name]
    local = value.to_local() if hasattr(value, "to_local") else value
    with torch.no_grad():
        local.view(torch.uint8).view(-1)[0] ^= 1
    torch.save(tree, path)
    return target


@pytest.mark.filterwarnings("ignore")
def test_replicas_of_a_parameter_that_differ_are_refused(meshes, tmp_path) -> None:
    """The message names the parameter and both files; no rank's copy is taken."""
    source = damaged(meshes / "hsdp", tmp_path / "hsdp", 2, "up.weight")

    message = refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")
    assert "up.weight" in message and "rank_0" in message and "rank_2" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_buffers_that_differ_take_rank_0_and_are_reported(meshes, tmp_path) -> None:
    """As FSDP's own full state dict does."""
    source = damaged(meshes / "hsdp", tmp_path / "hsdp", 3, "count")

    outcome = run("convert-ckpt", source, tmp_path / "out.pt", "--to", "torch")
    assert outcome.code == 0, outcome.err
    assert "count" in outcome.out + outcome.err
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]["count"]
    assert equal(found, torch.arange(3))


NAMES = [
    "model_world_size_{world}_rank_{rank}.pt",
    "checkpoint-rank{rank}.pt",
    "rank_{rank}.pth",
    "pytorch_model_fsdp_rank{rank}.bin",
    "{rank}.pt",
    "model.{rank}.pt",
    "step100_rank{rank:05d}.pt",
    "r{rank}_of_v2.pt",
    "ckpt_ws{world}_rank{rank}.pth",
]
ORIGIN = ROOT / "2.3.1" / "w4_hybrid_block_orig_mesh" / "sharded_rank"


@pytest.mark.parametrize("name", NAMES)
def test_any_name_with_a_rank_in_it_will_do(name, tmp_path) -> None:
    """Trainers name their files as they like; the ranks are numbers all the same."""
    source = tmp_path / "run-7-of-12"
    source.mkdir()
    for path in ORIGIN.glob("model_*"):
        rank = int(path.stem.rpartition("_")[2])
        shutil.copy(path, source / name.format(world=4, rank=rank))
    expected = load(ORIGIN, LoadOptions(with_optimizer=False)).index

    for given in (source, source / name.format(world=4, rank=2)):
        index = load(given, OPTIONS).index
        assert {n: values(t).tolist() for n, t in index.model.items()} == {
            n: values(t).tolist() for n, t in expected.model.items()
        }


def shards_of(world: int, folder: Path, name: str) -> torch.Tensor:
    """The rank files of a wide DTensor, without a job: mesh and shard are set by hand."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = torch.randn(world * 3 - 2, 2)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = DeviceMesh("cpu", list(range(world)))
            local = whole[rank * 3 : rank * 3 + 3].clone()
            value = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1)
            )
            torch.save({"weight": value}, folder / name.format(rank=rank))
        finally:
            dist.destroy_process_group()
    return whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["m-rank{rank}.pt", "m_{rank}.pt"])
def test_more_than_ten_ranks_are_taken_in_numeric_order(name, tmp_path) -> None:
    """Rank 10 comes after rank 9, not after rank 1."""
    whole = shards_of(12, tmp_path, name)

    assert equal(values(load(tmp_path, OPTIONS).index.model["weight"]), whole)


@pytest.mark.filterwarnings("ignore")
def test_a_missing_rank_among_many_is_named(tmp_path) -> None:
    """Rank 11 of 12, the last one; and rank 1, beside 10 and 11."""
    shards_of(12, tmp_path, "m-rank{rank}.pt")
    for gone in (11, 1):
        (tmp_path / f"m-rank{gone}.pt").rename(tmp_path / "away")
        message = refused(3, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "hf")
        assert re.search(rf"\[?\b{gone}\b", message)
        (tmp_path / "away").rename(tmp_path / f"m-rank{gone}.pt")


def test_plain_replicated_tensors_are_never_joined(tmp_path) -> None:
    """World size 1 and NO_SHARD save whole tensors on each rank: one copy, not a taller tensor."""
    model = {"a": torch.randn(4, 3), "b": torch.arange(3)}
    for rank in range(3):
        torch.save(model, tmp_path / f"model_rank{rank}.pt")

    index = load(tmp_path, OPTIONS).index
    assert all(equal(values(index.model[n]), value) for n, value in model.items())


def test_plain_tensors_that_differ_are_refused(tmp_path) -> None:
    """Nothing says that they are buffers, so nothing may be chosen."""
    for rank in range(2):
        torch.save({"a": torch.full((4,), float(rank))}, tmp_path / f"model_rank{rank}.pt")

    assert "a" in refused(3, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "hf")


def test_a_tensor_that_only_some_ranks_have_is_refused_or_whole(tmp_path) -> None:
    """Rank 1 lacks a plain tensor that rank 0 saved: an expert of its own, or a mixed folder."""
    torch.save({"a": torch.ones(4), "expert": torch.ones(2)}, tmp_path / "model_rank0.pt")
    torch.save({"a": torch.ones(4)}, tmp_path / "model_rank1.pt")

    outcome = run("convert-ckpt", tmp_path, tmp_path / "out.pt", "--to", "torch")
    if outcome.code == 0:
        assert set(torch.load(tmp_path / "out.pt")["model"]) == {"a", "expert"}
        assert "expert" in outcome.out + outcome.err
    else:
        assert outcome.code in (3, 5) and "expert" in outcome.err
