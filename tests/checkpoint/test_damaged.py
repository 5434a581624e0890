"""Files cut off, bytes flipped, parts missing: an error, or a result that is the same."""

import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from fsdp_migrate.checkpoint.convert import Request, convert
from fsdp_migrate.checkpoint.load import LoadOptions, load
from fsdp_migrate.errors import MigrateError, SourceError
from tests.checkpoint.cases import ROOT
from tests.checkpoint.command import refused
from tests.checkpoint.saved import Saved, every_saved

SAVED = {saved.id: saved for saved in every_saved()}


def copied(saved: Saved, folder: Path) -> Path:
    """The checkpoint where it may be damaged."""
    target = folder / saved.source.name
    if saved.source.is_dir():
        shutil.copytree(saved.source, target)
    else:
        folder.mkdir(exist_ok=True)
        shutil.copy(saved.source, target)
    return target


def boundaries(path: Path) -> Iterator[int]:
    """Where one structure of a zip archive ends and the next begins."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<2H", data, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            yield from (info.header_offset, info.header_offset + 30, start, start + info.file_size)
        yield archive.start_dir
    for signature in (b"PK\x01\x02", b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"):
        yield from (match.start() for match in re.finditer(signature, data))


@pytest.mark.parametrize("version", ["1.13.1", "2.0.1", "2.3.1", "2.6.0", "2.15.0"])
def test_an_archive_cut_at_any_boundary_is_refused(version, tmp_path) -> None:
    """Before, at and after the end of every record, header and directory of a torch file."""
    whole = ROOT / version / "w2_full_block_flat" / "full" / "pytorch_model_fsdp.bin"
    data, path = whole.read_bytes(), tmp_path / "model.bin"
    cuts = sorted({at + d for at in boundaries(whole) for d in (-1, 0, 1)} & set(range(len(data))))
    path.write_bytes(data)
    load_options = SAVED[f"{version}-w2_full_block_flat-dcp"].options()
    load(path, load_options)

    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(SourceError):
            load(path, load_options)


def test_a_dcp_folder_cut_at_any_boundary_is_refused(tmp_path) -> None:
    """At the end of every item of every file, and anywhere in `.metadata`."""
    saved = SAVED["2.13.0-w2_full_block_orig_mesh-dcp"]
    folder = copied(saved, tmp_path) / "pytorch_model_fsdp_0"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    ends = {(i.relative_path, i.offset + i.length) for i in metadata.storage_data.values()}
    load(folder, saved.options())

    for name, end in sorted(ends):
        data = (folder / name).read_bytes()
        for cut in {end - 1, min(end, len(data) - 1)}:
            (folder / name).write_bytes(data[:cut])
            with pytest.raises(SourceError, match=re.escape(name)):
                load(folder, saved.options())
        (folder / name).write_bytes(data)
    data = (folder / ".metadata").read_bytes()
    for cut in range(0, len(data), 61):
        (folder / ".metadata").write_bytes(data[:cut])
        with pytest.raises(SourceError):
            load(folder, saved.options())


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path) -> None:
    """In its length, its header or its data; and bytes too many are one too many."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(2, dtype=torch.int64)}, path)
    data = path.read_bytes()
    options = LoadOptions()
    load(path, options)

    for changed in [*(data[:cut] for cut in range(len(data))), data + b"\0"]:
        path.write_bytes(changed)
        with pytest.raises(SourceError):
            load(path, options)


FLIPPED = {
    "one file of torch 2.1": ("2.1.2-w2_full_block_flat-full-optimizer", "*"),
    "one file of torch 2.13": ("2.13.0-w3_full_block_flat_tied-full-optimizer", "*"),
    "ShardedTensors of torch 1.13": ("1.13.1-w2_full_block_flat-ranks", "*"),
    "ShardedTensors of torch 2.15": ("2.15.0-w2_full_block_orig_ignored-ranks", "*"),
    "DTensors of torch 2.3": ("2.3.1-w2_full_block_orig_mesh-ranks", "*"),
    "DTensors of torch 2.13": ("2.13.0-w4_hybrid_block_orig_mesh-ranks", "*"),
    "DCP data": ("2.6.0-w2_full_block_orig_mesh-dcp", "*.distcp"),
    "DCP metadata of torch 2.0": ("2.0.1-w2_full_block_flat-dcp", ".metadata"),
    "DCP metadata of torch 2.13": ("2.13.0-w2_full_block_orig_mesh-dcp", ".metadata"),
}


def outcome(saved: Saved, source: Path, output: Path) -> dict[str, str] | None:
    """The hash of every tensor that a conversion gives; None where it refuses."""
    output.unlink(missing_ok=True)
    try:
        return dict(convert(Request(source, output, "torch", saved.options())).hashes)
    except MigrateError:
        assert not output.exists()
        return None


@pytest.mark.parametrize(("name", "pattern"), FLIPPED.values(), ids=FLIPPED)
def test_a_flipped_byte_is_found_or_changes_nothing(name, pattern, tmp_path) -> None:
    """Whichever byte of whichever file: an error or the very same result, and no traceback."""
    saved = SAVED[name]
    source, output = copied(saved, tmp_path / "source"), tmp_path / "full.pt"
    files = [source] if source.is_file() else [p for p in source.rglob(pattern) if p.is_file()]
    expected = outcome(saved, source, output)
    assert expected

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.sampled_from(sorted(files)), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
    def flip(path: Path, place: float, bits: int) -> None:
        data = path.read_bytes()
        at = int(place * len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :])
        try:
            assert outcome(saved, source, output) in (None, expected)
        finally:
            path.write_bytes(data)

    flip()


def test_missing_rank_files_are_named(tmp_path) -> None:
    """With the last rank gone, and with one in the middle gone."""
    for gone in (0, 1, 2):
        source = copied(SAVED["2.6.0-w3_full_block_orig-ranks"], tmp_path / str(gone))
        (source / f"model_world_size_3_rank_{gone}.pt").unlink()

        message = refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")
        assert re.search(rf"\b{gone}\b", message)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", ["1.13.1", "2.1.2", "2.15.0"])
def test_the_records_themselves_tell_of_a_missing_last_rank(version, tmp_path) -> None:
    """Where file names give no world size, ShardedTensors do."""
    source = copied(SAVED[f"{version}-w2_full_block_flat-ranks"], tmp_path)
    for path in list(source.iterdir()):
        kind, rank = path.name.split("_")[0], path.stem[-1]
        path.rename(source / f"{kind}-rank{rank}.pt")
    (source / "model-rank1.pt").unlink()
    (source / "optim-rank1.pt").unlink()

    assert "[1]" in refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "torch")


def test_files_of_two_world_sizes_are_not_mixed(tmp_path) -> None:
    """By their names, and by their records where the names are silent."""
    two = SAVED["2.6.0-w2_full_block_flat-ranks"].source
    three = copied(SAVED["2.6.0-w3_full_block_orig-ranks"], tmp_path)
    for path in two.iterdir():
        shutil.copy(path, three)
    assert "2 and 3" in refused(3, "convert-ckpt", three, tmp_path / "out", "--to", "hf")

    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for rank, origin in enumerate(("2_rank_0", "2_rank_1", "3_rank_2")):
        shutil.copy(three / f"model_world_size_{origin}.pt", mixed / f"model-rank{rank}.pt")
    message = refused(3, "convert-ckpt", mixed, tmp_path / "out", "--to", "hf")
    assert "world sizes 2" in message


def test_dcp_without_its_metadata_is_refused(tmp_path) -> None:
    """DCP writes it last: the save was cut off."""
    folder = copied(SAVED["2.6.0-fsdp2_w3-dcp_get_state_dict"], tmp_path)
    (folder / ".metadata").unlink()

    assert ".metadata" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "hf")


def test_a_missing_distcp_file_is_named(tmp_path) -> None:
    """Not the tensors that were in it, but the file."""
    folder = copied(SAVED["2.6.0-fsdp2_w3-dcp_get_state_dict"], tmp_path)
    (folder / "__1_0.distcp").unlink()

    assert "__1_0.distcp" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "hf")


def edited(folder: Path, edit) -> Path:
    """`.metadata` after `edit`, through torch's own classes."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


EMBEDDING = "model.model.embed_tokens.weight"


def _hole(metadata) -> None:
    metadata.state_dict_metadata[EMBEDDING].chunks.pop()


def _overlap(metadata) -> None:
    chunks = metadata.state_dict_metadata[EMBEDDING].chunks
    chunks[0].sizes = torch.Size((chunks[0].sizes[0] + 1, *chunks[0].sizes[1:]))


def _too_large(metadata) -> None:
    size = metadata.state_dict_metadata[EMBEDDING].size
    metadata.state_dict_metadata[EMBEDDING].size = torch.Size((size[0] + 1, *size[1:]))


def _without_data(metadata) -> None:
    index = next(i for i in metadata.storage_data if i.fqn == EMBEDDING)
    del metadata.storage_data[index]


def _swapped(metadata) -> None:
    """Two chunks of unequal length point at one another's bytes."""
    one, other = (
        MetadataIndex(EMBEDDING, metadata.state_dict_metadata[EMBEDDING].chunks[i].offsets)
        for i in (0, -1)
    )
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]


@pytest.mark.parametrize("edit", [_hole, _overlap, _too_large, _without_data, _swapped])
def test_holes_and_overlaps_are_refused(edit, tmp_path) -> None:
    """torch would load uninitialised memory there without a word."""
    folder = edited(copied(SAVED["2.13.0-fsdp2_w3-dcp_get_state_dict"], tmp_path), edit)

    message = refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")
    assert "embed_tokens.weight" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../secret", ".", ""])
def test_dcp_metadata_cannot_lead_out_of_its_folder(path, tmp_path) -> None:
    """A relative path that is none."""

    def edit(metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    folder = edited(copied(SAVED["2.13.0-fsdp2_w3-dcp_get_state_dict"], tmp_path), edit)
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())

    refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")


@pytest.mark.parametrize("path", ["../model.safetensors", "/etc/passwd", "..", "x/y"])
def test_a_weight_index_cannot_lead_out_of_its_folder(path, tmp_path) -> None:
    """The same for `model.safetensors.index.json`."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"total_size": 12}}, "weight_map": {{"a": "{path}"}}}}'
    )

    assert "outside" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")


def test_compressed_dcp_items_are_refused(tmp_path) -> None:
    """An item that went through an extension of torch's is named as such."""

    def edit(metadata) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]

    folder = edited(copied(SAVED["2.13.0-fsdp2_w3-dcp_get_state_dict"], tmp_path), edit)

    assert "zstd" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")


def test_files_from_before_torch_1_6_are_refused(tmp_path) -> None:
    """They are no zip archives; the message says what to do."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)

    message = refused(3, "convert-ckpt", path, tmp_path / "out", "--to", "torch")
    assert "torch.save" in message


def test_a_rank_named_wrongly_is_refused(tmp_path) -> None:
    """The record says who wrote it; two files that were swapped are not taken for one another."""
    source = copied(SAVED["2.6.0-w2_full_block_flat-ranks"], tmp_path)
    one, other = (source / f"model_world_size_2_rank_{r}.pt" for r in (0, 1))
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)

    assert "rank 1" in refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")


def test_one_rank_of_another_run_is_refused(tmp_path) -> None:
    """Same names and world size, other shapes."""
    source = copied(SAVED["2.6.0-w2_full_block_flat-ranks"], tmp_path)
    file = source / "model_world_size_2_rank_1.pt"
    tree = torch.load(ROOT / "2.6.0/w2_full_block_flat/full/pytorch_model_fsdp.bin")
    torch.save(tree, file)

    refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")
