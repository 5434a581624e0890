"""Pickles that would do something if they were run, or cost more than a machine has."""

import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from tests.checkpoint.command import converted, refused, run
from tests.checkpoint.forge import Call, archive, dumps, model_file

WEIGHT = torch.ones(4)


def calls(canary: str) -> list[Call]:
    touch = f"touch {canary}"
    code = f"open({canary!r}, 'w')"
    return [
        Call("os", "system", touch),
        Call("posix", "system", touch),
        Call("nt", "system", touch),
        Call("subprocess", "Popen", ["touch", canary]),
        Call("builtins", "eval", code),
        Call("builtins", "exec", code),
        Call("__builtin__", "eval", code),
        Call("builtins", "open", canary, "w"),
        Call("builtins", "__import__", "os"),
        Call("builtins", "getattr", Call("builtins", "object"), "__class__"),
        Call("builtins", "getattr", "x", "format"),
        Call("pathlib", "Path.touch", Call("pathlib", "Path", canary)),
        Call("functools", "partial", Call("os", "system", touch)),
        Call("operator", "attrgetter", "__class__"),
        Call("runpy", "run_path", canary),
        Call("pickle", "loads", b"."),
        Call("importlib", "import_module", "os"),
        Call("shutil", "rmtree", canary),
        Call("webbrowser", "open", canary),
        Call("torch", "load", canary),
        Call("torch", "save", 1, canary),
        Call("torch.hub", "load", "a/b", "c"),
        Call("torch.hub", "load_state_dict_from_url", "http://127.0.0.1"),
        Call("torch.serialization", "load", canary),
        Call("torch._utils", "_import_dotted_name", "os.system"),
        Call("torch.utils.cpp_extension", "load", "a", [canary]),
        Call("torch.storage", "_load_from_bytes", b"PK"),
        Call("torch.jit", "load", canary),
    ]


CALLS = {f"{call.module}.{call.function}-{n}": n for n, call in enumerate(calls("x"))}


@pytest.fixture
def canary(tmp_path):
    """A file that must not appear."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


@pytest.mark.parametrize("number", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("place", ["in the model", "beside it", "as a key", "as the whole"])
def test_a_forbidden_call_is_named_and_never_run(tmp_path, canary, number, place) -> None:
    """Wherever it stands, a global of the standard library or torch's functions ends it all."""
    call = calls(str(canary))[number]
    trees = {
        "in the model": {"weight": WEIGHT, "bias": call},
        "beside it": {"model": {"weight": WEIGHT}, "args": [call]},
        "as a key": {"model": {"weight": WEIGHT, ("x", call): 1}},
        "as the whole": call,
    }
    source = model_file(tmp_path / "model.pt", trees[place])
    before = source.read_bytes()

    message = refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")
    inner = [call, *(a for a in call.arguments if isinstance(a, Call))]
    assert any(c.function in message for c in inner), message
    assert not (tmp_path / "out").exists()
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    "call",
    [
        Call("numpy", "load", "x"),
        Call("numpy.testing._private.utils", "runstring", "x", {}),
        Call("omegaconf.dictconfig", "DictConfig"),
        Call("sklearn.utils._testing", "set_random_state", 1),
    ],
    ids=lambda call: call.module,
)
def test_a_foreign_object_inside_the_model_is_refused(tmp_path, call) -> None:
    """A state dict of tensors cannot hold one, so leaving it out would lose a weight."""
    source = model_file(tmp_path / "model.pt", {"weight": WEIGHT, "bias": call})

    assert call.module in refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")


def test_a_foreign_object_beside_the_model_is_left_out_and_named(tmp_path) -> None:
    """Training arguments and the like never stop a conversion, and are never run."""
    tree = {
        "model": {"weight": WEIGHT},
        "args": Call("argparse", "Namespace"),
        "c": Call("x.y", "Z"),
    }
    source = model_file(tmp_path / "model.pt", tree)

    outcome = run("convert-ckpt", source, tmp_path / "out", "--to", "hf")
    assert outcome.code == 0
    assert "argparse.Namespace" in outcome.out + outcome.err
    assert "x.y.Z" in outcome.out + outcome.err


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "step"
    save(
        {"model": {"weight": WEIGHT}, "note": "some words that are a bytes item"},
        storage_writer=FileSystemWriter(folder),
        no_dist=True,
    )
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_forbidden_call_in_dcp_metadata_is_not_run(tmp_path, canary, dcp_folder) -> None:
    """torch itself unpickles `.metadata` without a question."""
    folder = tmp_path / "step"
    shutil.copytree(dcp_folder, folder)
    (folder / ".metadata").write_bytes(dumps(Call("os", "system", f"touch {canary}")))

    assert "system" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")


def test_a_forbidden_call_in_a_dcp_item_is_not_run(tmp_path, canary, dcp_folder) -> None:
    """Objects in `.distcp` files are pickles too; the item is replaced by one of the same size."""
    folder = tmp_path / "step"
    shutil.copytree(dcp_folder, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = [i for i in metadata.storage_data if i.fqn == "note"]
    info = metadata.storage_data[index]
    forged = archive(tmp_path / "item", dumps(Call("os", "system", f"touch {canary}"))).read_bytes()
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(forged)
    with file.open("ab") as stream:
        stream.write(forged)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    assert "system" in refused(3, "convert-ckpt", folder, tmp_path / "out", "--to", "torch")


def nested(depth: int) -> bytes:
    return pickle.PROTO + b"\x02" + b"(" * depth + b"l" * depth + b"."


def laughs(levels: int) -> bytes:
    """Lists of ten times the list before: 10 ** levels values in a few hundred bytes."""
    value: list = []
    for _ in range(levels):
        value = [value] * 10
    return pickle.dumps({"weights": value}, protocol=2)


def own_member() -> bytes:
    value: list = []
    value.append(value)
    return pickle.dumps({"weights": value}, protocol=2)


BOMBS = {
    "nesting": nested(100_000),
    "a list of lists": laughs(30),
    "a list in itself": own_member(),
    "a memo of billions": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a string of exabytes": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "bytes of gigabytes": b"\x80\x04\x8e\x00\x00\x00\x00\x40\x00\x00\x00.",
    "a number of gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "bytes by constructor": b"\x80\x02c__builtin__\nbytes\n\x8a\x05\x00\x00\x00\x00\x04\x85R.",
    "a dict whose methods are hidden": b"\x80\x02ccollections\nOrderedDict\n)R}U\x05itemsK\x01sb.",
    "no stop": b"\x80\x02}",
    "nothing": b"",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_pickle_bomb_is_an_error_soon_and_cheaply(tmp_path, bomb) -> None:
    """One message, not a traceback, a full memory or an endless walk."""
    source = archive(tmp_path / "model.pt", bomb)

    refused(3, "convert-ckpt", source, tmp_path / "out", "--to", "hf")


def test_what_the_forgery_makes_is_otherwise_a_good_file(tmp_path) -> None:
    """The refusals above are not because nothing forged can be read."""
    source = model_file(tmp_path / "model.pt", {"model": {"weight": WEIGHT}})

    output = converted(source, tmp_path / "out.pt", "torch")
    assert torch.equal(torch.load(output)["model"]["weight"], WEIGHT)
