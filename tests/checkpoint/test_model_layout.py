"""Layouts from the user's model, a transformers config, JSON and other checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_migrate.checkpoint import meta_model
from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.model_layout import (
    Buffer,
    ModelLayout,
    Parameter,
    from_index,
    from_json,
)
from fsdp_migrate.checkpoint.tensors import Extent, Tensor
from fsdp_migrate.errors import SourceError, UsageError
from tests.checkpoint.tiny_model import Tiny

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(4, dtype=torch.int64))

def make():
    print("building")
    return Net()

def with_optimizer():
    net = Net()
    groups = [{"params": [net.a.weight]}, {"params": [net.a.bias], "weight_decay": 0}]
    return net, torch.optim.SGD(groups, lr=0.1)

def fails():
    raise ValueError("no such size")

def exits():
    raise SystemExit(3)

def reads():
    return float(torch.zeros(1).sum().item())

def other():
    return {"a": 1}

def lazy():
    return nn.LazyLinear(3)

def empty():
    return nn.Identity()

number = 3
module = Net()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working folder, under a fresh name."""
    name = f"user_models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / f"{name}_wrong.py").write_text("x = = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize("factory", ["make", "Net", "module"])
def test_a_factory_a_class_and_a_module_give_the_layout(models: str, factory: str) -> None:
    layout = meta_model.from_factory(f"{models}:{factory}")
    assert [(p.name, p.shape, p.dtype, p.same_as) for p in layout] == [
        ("a.weight", (2, 3), "float32", None),
        ("a.bias", (2,), "float32", None),
        ("b.weight", (2, 3), "float32", "a.weight"),
    ]
    assert layout.buffers == (Buffer("count", (4,), "int64"),)
    assert [p.name for p in layout.distinct()] == ["a.weight", "a.bias"]


def test_what_the_factory_prints_does_not_reach_stdout(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meta_model.from_factory(f"{models}:make")
    assert capsys.readouterr().out == ""


def test_a_factory_may_tell_the_param_groups(models: str) -> None:
    layout = meta_model.from_factory(f"{models}:with_optimizer")
    assert [p.group for p in layout] == [0, 1, 0]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("make", UsageError, "expected PACKAGE.MODULE:FACTORY"),
        ("{}_nowhere:make", UsageError, "no module .*_nowhere"),
        ("{}.inner:make", UsageError, "no module|not a package"),
        ("{}:absent", UsageError, "has no absent"),
        ("{}:number", UsageError, "neither an nn.Module nor can it be called"),
        ("{}:other", UsageError, "returns a dict, not an nn.Module"),
        ("{}:fails", SourceError, "ValueError: no such size.*line"),
        ("{}:exits", SourceError, "SystemExit"),
        ("{}:reads", SourceError, "meta"),
        ("{}:lazy", SourceError, "no shape yet"),
        ("{}:empty", SourceError, "no parameters"),
        ("{}_broken:make", SourceError, "no_such_package_anywhere"),
        ("{}_wrong:make", SourceError, "SyntaxError"),
    ],
)
def test_each_failure_of_a_factory_is_a_message(
    models: str, spec: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        meta_model.from_factory(spec.format(models))


def test_importing_layouts_needs_no_torch() -> None:
    """Only building a model does."""
    code = (
        "import sys; import fsdp_migrate.checkpoint.raw_optimizer, fsdp_migrate.checkpoint.flat, "
        "fsdp_migrate.checkpoint.meta_model; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_config_gives_the_layout(tmp_path: Path, tied: bool) -> None:
    """The same names, shapes and ties as the model itself, built for real."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": tied}))
    layout = meta_model.from_hf_config(tmp_path)
    config = transformers.AutoConfig.from_pretrained(str(tmp_path))
    model = transformers.LlamaForCausalLM(config)
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert [(p.name, p.shape) for p in layout] == [(n, tuple(p.shape)) for n, p in expected.items()]
    alias = next(p for p in layout if p.name == "lm_head.weight").same_as
    assert alias == ("model.embed_tokens.weight" if tied else None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "No such file"),
        ("{", "not a JSON file"),
        ("[]", "not a transformers config"),
        (json.dumps({**LLAMA, "architectures": []}), "names no architecture"),
        (json.dumps({**LLAMA, "architectures": ["OurOwnModel"]}), "has no OurOwnModel"),
        (json.dumps({**LLAMA, "architectures": ["A", "B"]}), "several architectures"),
        (json.dumps({**LLAMA, "model_type": "never_heard_of"}), "never_heard_of"),
    ],
)
def test_each_failure_of_a_config_is_a_message(
    tmp_path: Path, config: str | None, message: str
) -> None:
    pytest.importorskip("transformers")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SourceError, match=message):
        meta_model.from_hf_config(tmp_path)


SIZES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
PARAMETERS = st.builds(
    Parameter,
    st.just(""),
    SIZES,
    dtype=st.sampled_from((None, "float32", "bfloat16")),
    trainable=st.sampled_from((None, True, False)),
    certain=st.booleans(),
    group=st.sampled_from((None, 0, 3)),
)


@given(st.lists(PARAMETERS, max_size=5), st.lists(SIZES, max_size=3))
def test_json_round_trip(parameters: list[Parameter], buffers: list[tuple[int, ...]]) -> None:
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    numbered = [replace(p, name=f"p{at}", strides=p.shape) for at, p in enumerate(parameters)]
    numbered += [replace(p, name=f"{p.name}.again", same_as=p.name) for p in numbered[:1]]
    layout = ModelLayout(
        tuple(numbered), tuple(Buffer(f"b{at}", shape) for at, shape in enumerate(buffers))
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layout.json"
        path.write_text(layout.to_json())
        again = from_json(path)
    assert (again.parameters, again.buffers) == (layout.parameters, layout.buffers)


def document(*parameters: object, **changes: object) -> str:
    head = {"format": "fsdp-migrate model layout", "version": 1, "parameters": list(parameters)}
    return json.dumps({**head, **changes})


P = {"name": "p", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[]", "not a model layout"),
        ("{}", "not a model layout"),
        (document(version=2), "version 2 .* reads version 1"),
        (document(extra=1), "unknown field 'extra'"),
        (document(parameters={}), "parameters: expected a list"),
        (document(3), r"parameters\[0\]: expected an object"),
        (document(P, {"name": "q"}), r"parameters\[1\]: shape is missing"),
        (document({**P, "name": ""}), r"parameters\[0\].name: expected a name"),
        (document({**P, "shape": [2, -3]}), r"parameters\[0\].shape: expected a list of sizes"),
        (document({**P, "shape": [2, True]}), r"parameters\[0\].shape"),
        (document({**P, "shape": "2x3"}), r"parameters\[0\].shape"),
        (document({**P, "stride": [3, 1]}), "unknown field 'stride'"),
        (document({**P, "strides": [3]}), "1 strides for 2 dimensions"),
        (document({**P, "dtype": "float31"}), "expected a dtype of torch"),
        (document({**P, "trainable": 1}), "expected true or false"),
        (document({**P, "group": -1}), "the number of a param group"),
        (document(P, P), "p is listed twice"),
        (document({**P, "same_as": "q"}), "no earlier parameter"),
        (document(P, {"name": "q", "shape": [3, 2], "same_as": "p"}), "cannot be the same as p"),
        (document(P, buffers=[P]), "p is a parameter and a buffer"),
    ],
)
def test_each_fault_of_a_layout_file_names_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "layout.json"
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        from_json(path)


def test_a_layout_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        from_json(tmp_path / "layout.json")


def test_a_checkpoint_gives_a_layout(tmp_path: Path) -> None:
    """Parameters it calls so; floating tensors that may be parameters; certain buffers; ties."""

    def tensor(name: str, shape: tuple[int, ...], offset: int, dtype: str = "float32") -> Tensor:
        numel = 1
        for size in shape:
            numel *= size
        return Tensor(name, dtype, shape, (Extent(0, numel, tmp_path / "f", offset),))

    model = {
        "a": tensor("a", (2, 3), 0),
        "b": tensor("b", (4,), 100),
        "count": tensor("count", (), 200, "int64"),
        "c": tensor("c", (2, 3), 0),
    }
    layout = from_index(Index(model, roles={"a": "parameter", "c": "parameter"}), "a checkpoint")
    assert [(p.name, p.certain, p.same_as) for p in layout] == [
        ("a", True, None),
        ("b", False, None),
        ("c", True, "a"),
    ]
    assert layout.buffers == (Buffer("count", (), "int64"),)


def test_strides_are_kept_only_where_they_matter() -> None:
    with torch.device("meta"):
        layout = meta_model.from_module(Tiny(noncontig=True), None, "the model")
    assert [p.name for p in layout if p.strides is not None] == ["model.nc"]
    nc = next(p for p in layout if p.name == "model.nc")
    assert (nc.shape, nc.strides) == ((4, 6), (1, 4))
