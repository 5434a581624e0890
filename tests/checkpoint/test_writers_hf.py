"""The hf target, read by safetensors' own library and by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from fsdp_migrate.checkpoint.dtypes import DTYPES
from fsdp_migrate.checkpoint.index import Index, Optimizer
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.writers import TargetOptions, ties
from fsdp_migrate.checkpoint.writers import hf as writer
from fsdp_migrate.errors import Unsupported, UsageError
from tests.checkpoint.writer_contract import SHAPES, example, raw, store, write

NAMEABLE = st.sampled_from([d.name for d in DTYPES.values() if d.safetensors])


def _config(**changes) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 53}
    return transformers.LlamaConfig(**(sizes | heads | changes))


def _llama(folder: Path, *, tied: bool) -> tuple[transformers.LlamaForCausalLM, Index, dict]:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(_config(tie_word_embeddings=tied))
    state = model.state_dict()
    index = Index({name: store(folder, name, value) for name, value in state.items()})
    return model, index, json.loads(model.config.to_json_string(use_diff=False))


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(20).reshape(2, 10)).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [5 * 10**9, 9000])
def test_from_pretrained_gives_the_same_logits(tmp_path, tied, limit):
    """A real Llama, tied and untied, in one file and in many: bitwise the same logits."""
    model, index, config = _llama(tmp_path / "source", tied=tied)
    pair = frozenset(("model.embed_tokens.weight", "lm_head.weight"))
    options = TargetOptions(
        hf_config=config, max_shard_size=limit, proven_equal=frozenset({pair} if tied else ())
    )
    output = write(writer.plan(index, options), tmp_path / "out")
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(output, output_loading_info=True)

    assert torch.equal(_logits(loaded), _logits(model))
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert (output / "model.safetensors").exists() == (limit > 9000)


def test_a_tie_is_left_out_only_when_proven(tmp_path):
    """The config ties them, but nobody knows whether the bytes are equal: both are written."""
    _, index, config = _llama(tmp_path / "source", tied=True)
    plan = writer.plan(index, TargetOptions(hf_config=config))
    names = set(load_file(write(plan, tmp_path / "out") / "model.safetensors"))

    assert ties.tied_by_config(index, config) == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "lm_head.weight" in names
    assert any("not known to be equal" in note for note in plan.notes)


def test_a_tie_by_storage_needs_no_proof(tmp_path):
    """Two names over the same pieces are equal; an untied config still keeps both."""
    _, index, config = _llama(tmp_path / "source", tied=True)
    model = {**index.model, "lm_head.weight": index.model["model.embed_tokens.weight"]}
    index = Index(model)
    tied = writer.plan(index, TargetOptions(hf_config=config))
    untied = writer.plan(index, TargetOptions(hf_config=config | {"tie_word_embeddings": False}))

    assert "lm_head.weight" not in load_file(write(tied, tmp_path / "a") / "model.safetensors")
    assert "lm_head.weight" in load_file(write(untied, tmp_path / "b") / "model.safetensors")
    assert any("lm_head.weight is left out" in note for note in tied.notes)


def test_the_config_agrees_with_the_weights(tmp_path):
    """After a cast transformers builds the model in the new dtype and casts nothing again."""
    model, index, config = _llama(tmp_path / "source", tied=False)
    plan = writer.plan(index, TargetOptions(hf_config=config, dtype="bfloat16"))
    output = write(plan, tmp_path / "out")
    loaded = transformers.LlamaForCausalLM.from_pretrained(output, dtype="auto")

    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16())
    assert any("absent -> bfloat16" in note for note in plan.notes)


def test_a_config_of_mixed_weights_is_left_alone(tmp_path):
    """No one dtype would be true of all, so none is claimed, and that is said."""
    index = Index(
        {
            "a.weight": store(tmp_path / "s", "a", torch.ones(2)),
            "b.weight": store(tmp_path / "s", "b", torch.ones(2).half()),
        }
    )
    plan = writer.plan(index, TargetOptions(hf_config={"dtype": "bfloat16"}))

    assert json.loads((write(plan, tmp_path / "o") / "config.json").read_text()) == {
        "dtype": "bfloat16"
    }
    assert any("several dtypes (float16, float32)" in note for note in plan.notes)


def test_nested_configs_follow(tmp_path):
    """text_config has a dtype of its own; quantization_config's means something else."""
    config = {"text_config": {"torch_dtype": "float32"}, "quantization_config": {"dtype": "int4"}}
    index = Index({"a.weight": store(tmp_path / "s", "a", torch.ones(2).bfloat16())})
    plan = writer.plan(index, TargetOptions(hf_config=config))
    written = json.loads((write(plan, tmp_path / "o") / "config.json").read_text())

    assert written == {
        "text_config": {"torch_dtype": "bfloat16"},
        "quantization_config": {"dtype": "int4"},
    }


def test_sidecars_are_carried(tmp_path):
    """Byte for byte, config.json too when it already agrees."""
    source = tmp_path / "s"
    index = Index({"a.weight": store(source, "a", torch.ones(2))})
    (source / "config.json").write_text('{ "torch_dtype" :"float32" }')
    (source / "tokenizer.json").write_text("{}")
    sidecars = (source / "config.json", source / "tokenizer.json")
    output = write(writer.plan(index, TargetOptions(sidecars=sidecars)), tmp_path / "o")

    assert (output / "config.json").read_text() == '{ "torch_dtype" :"float32" }'
    assert (output / "tokenizer.json").read_text() == "{}"


def test_a_sidecar_never_replaces_weights(tmp_path):
    """An old model.safetensors among the source's files would shadow the new one."""
    index = Index({"a.weight": store(tmp_path / "s", "a", torch.ones(2))})
    (tmp_path / "model.safetensors").write_text("old")

    with pytest.raises(UsageError, match=r"model\.safetensors"):
        writer.plan(index, TargetOptions(sidecars=(tmp_path / "model.safetensors",)))


def test_the_index_counts_every_byte_once(tmp_path):
    """total_size is of the tensors, and every tensor is in the file that weight_map names."""
    values = {f"w{n}.weight": torch.randn(10, n + 1) for n in range(7)}
    index = Index({name: store(tmp_path / "s", name, value) for name, value in values.items()})
    output = write(writer.plan(index, TargetOptions(max_shard_size=300)), tmp_path / "o")
    content = json.loads((output / "model.safetensors.index.json").read_text())

    assert content["metadata"]["total_size"] == sum(v.nbytes for v in values.values())
    for name, path in content["weight_map"].items():
        with safe_open(output / path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(name), values[name])
    sizes = [sum(v.nbytes for v in load_file(p).values()) for p in output.glob("*.safetensors")]
    assert max(sizes) <= 300


def test_the_optimizer_has_no_place(tmp_path):
    """It is left out, and that is said."""
    state = {"a": {"exp_avg": store(tmp_path / "s", "x", torch.ones(2))}}
    index = Index({"a": store(tmp_path / "s", "a", torch.ones(2))}, Optimizer(state, ()))

    assert any("no place" in note for note in writer.plan(index, TargetOptions()).notes)


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES.values() if not d.safetensors])
def test_a_dtype_without_a_name_is_refused(dtype):
    """safetensors cannot say complex128; writing something else would be wrong."""
    index = Index({"a": Tensor("a", dtype, (0,), ())})

    with pytest.raises(Unsupported, match=dtype):
        writer.plan(index, TargetOptions())


@settings(max_examples=40, deadline=None)
@given(examples=st.lists(st.tuples(NAMEABLE, SHAPES), min_size=1, max_size=6))
def test_every_dtype_and_shape_survives(tmp_path_factory, examples):
    """0-dim, empty, bool, int, 8-bit floats, in any mix: safetensors reads the same bytes."""
    folder = tmp_path_factory.mktemp("dtypes")
    values = {f"t{n}": example(*drawn) for n, drawn in enumerate(examples)}
    index = Index({name: store(folder, name, value) for name, value in values.items()})
    output = write(writer.plan(index, TargetOptions()), folder / "o")
    loaded = load_file(output / "model.safetensors")

    for name, value in values.items():
        assert (loaded[name].dtype, loaded[name].shape) == (value.dtype, value.shape)
        assert raw(loaded[name]) == raw(value)
