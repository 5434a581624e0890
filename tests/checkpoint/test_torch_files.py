"""What torch.save can write beside plain contiguous float32 on a little-endian CPU."""

import struct
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_migrate.checkpoint.load import LoadOptions, load
from tests.checkpoint.cases import equal, values
from tests.checkpoint.command import converted, refused, run
from tests.checkpoint.forge import archive, dumps

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def saved(tree: object, folder, name: str = "model.pt"):
    path = folder / name
    torch.save(tree, path)
    return path


def back(source, folder, *arguments: object) -> dict[str, torch.Tensor]:
    """The model after a conversion to one file, as torch.load gives it."""
    output = converted(source, folder / "out" / "full.pt", "torch", *arguments)
    return torch.load(output, weights_only=True)["model"]


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every pattern of bytes is as good as another: NaNs with payloads too."""
    size = torch.empty((), dtype=dtype).element_size()
    count = int(torch.tensor(shape).prod()) if shape else 1
    data = torch.randint(0, 256, (count * size,), dtype=torch.uint8)
    return (
        data.remainder(2).bool().view(shape)
        if dtype == torch.bool
        else data.view(dtype).view(shape)
    )


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_every_dtype_keeps_every_bit(to, tmp_path) -> None:
    """fp8, the unsigned integers, complex numbers, NaN payloads: nothing is a number on the way."""
    model = {str(dtype): bits(dtype, 3, 5) for dtype in DTYPES}
    model |= {f"scalar {dtype}": bits(dtype) for dtype in DTYPES}
    model |= {f"empty {dtype}": bits(dtype, 0, 4) for dtype in DTYPES}
    source = saved({"model": model}, tmp_path)

    if to == "torch":
        found = back(source, tmp_path)
    else:
        from tests.checkpoint.read_back import dcp

        found = dcp(converted(source, tmp_path / "dcp", "dcp", "--ranks", 2))["model"]
    assert set(found) == set(model)
    assert [n for n, value in model.items() if not equal(found[n], value)] == []


def test_safetensors_keeps_every_dtype_it_has_and_refuses_the_others(tmp_path) -> None:
    """complex128 has no name there: refused, not cast."""
    from safetensors.torch import load_file

    model = {str(dtype): bits(dtype, 2, 3) for dtype in DTYPES if dtype != torch.complex128}
    hf = converted(saved(model, tmp_path), tmp_path / "hf", "hf")
    found = load_file(hf / "model.safetensors")
    assert [n for n, value in model.items() if not equal(found[n], value)] == []

    source = saved({**model, "z": bits(torch.complex128, 2)}, tmp_path, "z.pt")
    message = refused(3, "convert-ckpt", source, tmp_path / "no", "--to", "hf")
    assert "complex128" in message


def test_quantized_tensors_are_refused(tmp_path) -> None:
    """Their scale is not in their bytes."""
    source = archive(
        tmp_path / "q.pt",
        dumps({"a": torch.ones(4)}).replace(b"FloatStorage", b"QInt8Storage"),
        {"data/0": b"abcd"},
    )

    refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "torch")


def test_views_and_shared_storages_are_their_own_elements(tmp_path) -> None:
    """Slices, transposes, expanded and overlapping views of one storage."""
    base = torch.arange(60.0)
    grid = base.view(3, 4, 5)
    model = {
        "whole": grid,
        "same": grid,
        "row": grid[1],
        "column": grid[:, :, 2],
        "step": base[3:50:7],
        "transposed": grid.transpose(0, 2),
        "permuted": grid.permute(1, 2, 0),
        "expanded": base[:5].expand(4, 5),
        "windows": base.unfold(0, 8, 3),
        "diagonal": torch.diagonal(grid[:, :3, 0]),
        "scalar": base[17],
        "empty": base[5:5],
        "empty at the end": base[60:],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one row": grid[:1].transpose(1, 2),
    }

    found = back(saved(model, tmp_path), tmp_path)
    assert [name for name, value in model.items() if not equal(found[name], value)] == []
    assert all(value.is_contiguous() for value in found.values())


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_strided_view_is_read_element_by_element(tmp_path_factory, data) -> None:
    """Random shapes, strides and offsets over one storage, in one file."""
    model = {}
    base = torch.randn(500)
    for number in range(6):
        shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
        strides = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
        offset = data.draw(st.integers(0, 60))
        model[str(number)] = torch.as_strided(base, shape, strides, offset)
    source = saved(model, tmp_path_factory.mktemp("views"))

    found = load(source, LoadOptions()).index.model
    assert [n for n, value in model.items() if not equal(values(found[n]), value)] == []


def test_files_written_on_gpus_need_no_gpu(tmp_path) -> None:
    """Their storages carry tags like `cuda:3`, here and for other accelerators."""
    model = {"a": torch.randn(3, 4), "b": torch.randn(2).to(torch.float8_e4m3fn)}
    for tag in ("cuda:3", "xpu:0", "npu:7", "hpu"):
        path = tmp_path / f"{tag.replace(':', '')}.pt"
        with tagged(tag):
            torch.save(model, path)
        assert tag.encode() in path.read_bytes()

        found = back(path, tmp_path / tag)
        assert all(equal(found[name], value) for name, value in model.items())


class tagged:  # noqa: N801
    """While it lasts, torch takes every storage for one of the device `tag`."""

    def __init__(self, tag: str) -> None:
        self.tag = tag

    def __enter__(self) -> None:
        self.entry = (0, lambda _: self.tag, lambda *_: None)
        torch.serialization._package_registry.insert(0, self.entry)

    def __exit__(self, *_: object) -> None:
        torch.serialization._package_registry.remove(self.entry)


def test_files_without_checksums_are_read(tmp_path) -> None:
    """`torch.serialization.set_crc32_options(False)` leaves zeros where sums would be."""
    model = {"a": torch.randn(300, 7), "b": torch.zeros(3)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        source = saved(model, tmp_path)
    finally:
        torch.serialization.set_crc32_options(before)

    found = back(source, tmp_path)
    assert all(equal(found[name], value) for name, value in model.items())


def test_a_big_endian_file_is_refused(tmp_path) -> None:
    """Its bytes mean other numbers."""
    source = archive(
        tmp_path / "m.pt", dumps({"a": torch.ones(4)}), {"data/0": b"\0" * 16, "byteorder": b"big"}
    )

    assert "big-endian" in refused(3, "convert-ckpt", source, tmp_path / "o", "--to", "torch")


def test_a_compressed_archive_is_refused(tmp_path) -> None:
    """As after `zip -u`: torch stores plainly."""
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", dumps({"a": torch.ones(4)}))
        file.writestr("archive/data/0", b"\0" * 16)

    assert "compressed" in refused(3, "convert-ckpt", path, tmp_path / "o", "--to", "torch")


def zip64(path, pickled: bytes, data: bytes) -> None:
    """An archive in which every size and offset stands in zip64 fields, as over 4 GiB."""
    body, directory = bytearray(), bytearray()
    for name, content in (("a/data.pkl", pickled), ("a/data/0", data), ("a/version", b"3\n")):
        crc, size, at = zipfile.crc32(content), len(content), len(body)
        wide = struct.pack("<2H2Q", 1, 16, size, size)
        header = struct.pack(
            "<4s5H3L2H",
            b"PK\3\4",
            45,
            0,
            0,
            0,
            0,
            crc,
            0xFFFFFFFF,
            0xFFFFFFFF,
            len(name),
            len(wide),
        )
        body += header + name.encode() + wide + content
        extra = struct.pack("<2H3Q", 1, 24, size, size, at)
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(name),
            len(extra), 0, 0, 0, 0, 0xFFFFFFFF,
        ) + name.encode() + extra  # fmt: skip
    start, size = len(body), len(directory)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 3, 3, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0xFFFF, 0xFFFF, 3, 3, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(bytes(body + directory) + end64 + locator + end)


def test_zip64_records_are_read(tmp_path) -> None:
    """Small ones, in the form that records over 4 GiB have."""
    path = tmp_path / "m.pt"
    zip64(path, dumps({"a": torch.ones(4)}), torch.arange(4.0).numpy().tobytes())
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None

    assert equal(back(path, tmp_path)["a"], torch.arange(4.0))


def test_a_storage_of_more_than_4_gib_is_found_at_its_place(tmp_path) -> None:
    """A file of torch's own over 4 GiB; sparse, so that it takes neither disk nor time."""
    numel = (1 << 31) + 17
    path = tmp_path / "m.pt"
    with torch.serialization.skip_data():
        torch.save({"big": torch.empty(numel, dtype=torch.float16)}, path)
    assert path.stat().st_size > 2 * numel > 1 << 32
    with zipfile.ZipFile(path) as file:
        (name,) = [n for n in file.namelist() if n.endswith("data/0")]
        info = file.getinfo(name)
    local = path.open("rb")
    local.seek(info.header_offset + 26)
    sizes = struct.unpack("<2H", local.read(4))
    local.close()
    (piece,) = load(path, LoadOptions()).index.model["big"].pieces
    assert piece.offset == info.header_offset + 30 + sum(sizes)
    assert (piece.start, piece.stop) == (0, numel)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.bin", "model.ckpt", "weights"])
def test_a_file_is_known_by_its_content(name, tmp_path) -> None:
    """Not by its ending."""
    model = {"a": torch.randn(3)}

    assert equal(back(saved(model, tmp_path, name), tmp_path)["a"], model["a"])


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_model_is_found_at_any_depth(depth, tmp_path) -> None:
    """With its optimizer beside it, and what else trainers save."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    named = {
        "state": {n: optimizer.state[p] for n, p in net.named_parameters()},
        "param_groups": [{**optimizer.param_groups[0], "params": ["weight", "bias"]}],
    }
    tree: dict = {
        "model": net.state_dict(),
        "optimizer": named,
        "epoch": 3,
        "rng": torch.get_rng_state(),
    }
    for level in range(depth):
        tree = {f"level{level}": tree}
    source = saved(tree, tmp_path)

    output = converted(source, tmp_path / "full.pt", "torch")
    found = torch.load(output, weights_only=True)
    assert all(equal(found["model"][n], v) for n, v in net.state_dict().items())
    for name, entries in named["state"].items():
        assert all(equal(found["optim"]["state"][name][k], v) for k, v in entries.items())
    assert found["optim"]["param_groups"][0]["lr"] == 1e-3


def test_several_models_in_one_file_are_listed(tmp_path) -> None:
    """An EMA beside the model: the user says which, and gets that one."""
    model, ema = {"a": torch.randn(3)}, {"a": torch.randn(3)}
    source = saved({"net": model, "ema": ema}, tmp_path)

    message = refused(5, "convert-ckpt", source, tmp_path / "out", "--to", "torch")
    assert "net" in message and "ema" in message and "--model-root" in message
    assert equal(back(source, tmp_path, "--model-root", "ema")["a"], ema["a"])


def test_parameters_and_subclasses_are_tensors(tmp_path) -> None:
    """nn.Parameter and nn.Buffer pickle differently."""
    tree = OrderedDict(
        a=nn.Parameter(torch.randn(3)),
        b=nn.Buffer(torch.randn(2)),
        c=torch.randn(1).requires_grad_(),
    )

    found = back(saved(tree, tmp_path), tmp_path)
    assert all(equal(found[name], value.detach()) for name, value in tree.items())


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_none_and_numbers_in_a_state_dict_stop_nothing_and_are_not_hidden(to, tmp_path) -> None:
    """`_extra_state` and the like are carried along where the target can hold them, or named."""
    source = saved({"a": torch.randn(3), "b._extra_state": None, "version": 3}, tmp_path)

    outcome = run("convert-ckpt", source, tmp_path / "out", "--to", to)
    assert outcome.code == 0
    if to == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)
        assert found["version"] == 3 and found["b._extra_state"] is None
    else:
        assert "_extra_state" in outcome.out and "version" in outcome.out
