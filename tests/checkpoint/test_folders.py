"""Folders as trainers leave them: what is taken, what is left, what is asked."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_migrate.checkpoint.load import LoadOptions, load
from tests.checkpoint.cases import ROOT, Case, equal, values
from tests.checkpoint.command import converted, refused, run
from tests.checkpoint.saved import check_index

CASE = Case(ROOT / "2.6.0" / "w2_full_block_flat")
OPTIONS = LoadOptions()


def sidecars(folder: Path) -> None:
    """What Trainer and accelerate put beside a model."""
    torch.save({"lr": 1}, folder / "scheduler.pt")
    torch.save({"args": 1}, folder / "training_args.bin")
    for rank in range(2):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
        torch.save({"cpu": torch.get_rng_state()}, folder / f"random_states_{rank}.pkl")
    torch.save({"step": 1}, folder / "scheduler.bin")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "custom_checkpoint_0.pkl").write_bytes(b"\x80\x04.")


def test_a_trainer_checkpoint_is_enough(tmp_path) -> None:
    """`checkpoint-500/` with DCP folders of accelerate's names and all that stands beside them."""
    folder = tmp_path / "checkpoint-500"
    shutil.copytree(CASE.path / "sharded_dcp_new", folder)
    sidecars(folder)

    check_index(CASE, load(folder, OPTIONS).index)
    outcome = run("convert-ckpt", folder, tmp_path / "out", "--to", "dcp")
    assert outcome.code == 0 and "scheduler" in outcome.out + outcome.err


def test_older_accelerate_names_are_enough(tmp_path) -> None:
    """`pytorch_model_0/`, as accelerate called it first."""
    folder = tmp_path / "state"
    shutil.copytree(CASE.path / "sharded_dcp_new", folder)
    (folder / "pytorch_model_fsdp_0").rename(folder / "pytorch_model_0")
    sidecars(folder)

    check_index(CASE, load(folder, OPTIONS).index)


def test_full_files_of_accelerate_are_enough(tmp_path) -> None:
    """`pytorch_model_fsdp.bin` and `optimizer.bin`."""
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin"):
        shutil.copy(CASE.path / "full" / name, tmp_path)
    sidecars(tmp_path)

    check_index(CASE, load(tmp_path, OPTIONS).index)


def test_rank_files_of_accelerate_are_enough(tmp_path) -> None:
    """`pytorch_model_fsdp_rank0.bin`, `optimizer_rank0.bin`."""
    for path in (CASE.path / "sharded_rank").iterdir():
        rank = path.stem[-1]
        name = {"model": "pytorch_model_fsdp", "optim": "optimizer"}.get(path.name.split("_")[0])
        if name:
            shutil.copy(path, tmp_path / f"{name}_rank{rank}.bin")
    sidecars(tmp_path)

    check_index(CASE, load(tmp_path, OPTIONS).index)


def test_verls_actor_folder_is_enough(tmp_path) -> None:
    """`global_step_10/actor/` with its `huggingface/` folder, whose config goes along to hf."""
    actor = tmp_path / "global_step_10" / "actor"
    shutil.copytree(CASE.path / "sharded_rank", actor)
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text('{"model_type": "x"}')
    (actor / "huggingface" / "tokenizer.json").write_text("{}")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 2}')

    check_index(CASE, load(actor, OPTIONS).index)
    check_index(CASE, load(tmp_path / "global_step_10", OPTIONS).index)
    output = converted(actor, tmp_path / "hf", "hf")
    names = {path.name for path in output.iterdir()}
    assert names >= {"config.json", "tokenizer.json", "model.safetensors"}


def test_several_checkpoints_are_listed_and_none_is_taken(tmp_path) -> None:
    """A run's folder with two steps in it."""
    for step in (100, 200):
        shutil.copytree(CASE.path / "sharded_dcp_new", tmp_path / f"checkpoint-{step}")

    message = refused(5, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "hf")
    assert "checkpoint-100" in message and "checkpoint-200" in message
    assert not (tmp_path / "out").exists()


def test_two_models_side_by_side_are_listed(tmp_path) -> None:
    """An actor and a critic; either can be given itself."""
    torch.save({"a": torch.ones(2)}, tmp_path / "actor.pt")
    torch.save({"a": torch.zeros(3)}, tmp_path / "critic.pt")

    message = refused(5, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "hf")
    assert "actor.pt" in message and "critic.pt" in message
    converted(tmp_path / "critic.pt", tmp_path / "out", "hf")


def test_a_folder_with_nothing_of_ours_says_so(tmp_path) -> None:
    """And says what would be."""
    (tmp_path / "notes.txt").write_text("x")

    assert "DCP" in refused(3, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "hf")


MODEL = {
    "a.weight": torch.randn(6, 5),
    "b.weight": torch.randn(3).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
}


def test_one_safetensors_file_is_a_source(tmp_path) -> None:
    """To dcp and back."""
    save_file(MODEL, tmp_path / "model.safetensors")

    dcp = converted(tmp_path / "model.safetensors", tmp_path / "dcp", "dcp", "--ranks", 2)
    found = load_file(converted(dcp, tmp_path / "hf", "hf") / "model.safetensors")
    assert all(equal(found[name], value) for name, value in MODEL.items())


def test_a_hugging_face_folder_in_parts_is_a_source(tmp_path) -> None:
    """Its index lists the parts; one missing is named; links into a cache are followed."""
    folder, cache = tmp_path / "hf", tmp_path / "blobs"
    folder.mkdir()
    cache.mkdir()
    parts, names = {}, list(MODEL)
    for number, chosen in enumerate((names[:2], names[2:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({n: MODEL[n] for n in chosen}, cache / str(number))
        (folder / file).symlink_to(cache / str(number))
        parts |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))

    index = load(folder, OPTIONS).index
    assert all(equal(values(index.model[name]), value) for name, value in MODEL.items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")
    assert "model-00002-of-00002.safetensors" in message


def test_an_index_that_promises_what_no_part_holds_is_refused(tmp_path) -> None:
    """And a part with a tensor that the index does not list."""
    save_file({"a": torch.ones(2)}, tmp_path / "p.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    for listed in ({"a": "p.safetensors", "b": "p.safetensors"},):
        path.write_text(json.dumps({"weight_map": listed}))
        assert "b" in refused(3, "convert-ckpt", tmp_path, tmp_path / "o", "--to", "torch")


def test_torch_bin_parts_with_an_index_are_a_source(tmp_path) -> None:
    """`pytorch_model.bin.index.json`."""
    names = list(MODEL)
    parts = {}
    for number, chosen in enumerate((names[:2], names[2:]), 1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({n: MODEL[n] for n in chosen}, tmp_path / file)
        parts |= dict.fromkeys(chosen, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": parts}))

    index = load(tmp_path, OPTIONS).index
    assert all(equal(values(index.model[name]), value) for name, value in MODEL.items())


@pytest.mark.filterwarnings("ignore")
def test_safetensors_that_torchs_own_writer_sharded_are_a_source(tmp_path) -> None:
    """HuggingFaceStorageWriter puts each rank's box into the file's metadata."""
    whole = torch.randn(5, 4)
    for rank, rows in enumerate(((0, 3), (3, 5))):
        info = {"w": {"saved_offsets": [rows[0], 0]}}
        save_file(
            {"w": whole[rows[0] : rows[1]].clone()},
            tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )

    assert equal(values(load(tmp_path, OPTIONS).index.model["w"]), whole)
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    refused(3, "convert-ckpt", tmp_path, tmp_path / "out", "--to", "torch")


@pytest.mark.filterwarnings("ignore")
def test_torchs_hugging_face_writer_is_read(tmp_path) -> None:
    """A folder that dcp.save wrote through it."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "hf"
    folder.mkdir()
    storage = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=dict.fromkeys(MODEL, 1)
    )
    dcp.save(dict(MODEL), storage_writer=storage, no_dist=True)

    index = load(folder, OPTIONS).index
    assert all(equal(values(index.model[name]), value) for name, value in MODEL.items())


@pytest.mark.filterwarnings("ignore")
def test_dcp_items_of_safetensors_serialization_are_read(tmp_path) -> None:
    """A `.distcp` file may end in one safetensors blob instead of many torch archives."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    folder = tmp_path / "dcp"
    writer = dcp.FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": dict(MODEL)}, storage_writer=writer, no_dist=True)

    index = load(folder, OPTIONS).index
    assert all(equal(values(index.model[name]), value) for name, value in MODEL.items())
