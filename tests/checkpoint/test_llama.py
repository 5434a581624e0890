"""A real transformers model, from flat parameters of FSDP1 to `from_pretrained`."""

import json

import pytest
import torch

from tests.checkpoint.cases import equal
from tests.checkpoint.command import converted
from tests.checkpoint.ranks import run_script

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    run_script("llama_ranks.py", 2, folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_logits_are_bitwise_those_of_the_trained_model(trained, tmp_path, name) -> None:
    """LOCAL_STATE_DICT, layout from the config alone; tied weights are written once."""
    source, config = trained / name / "checkpoint", trained / name / "config"
    output = converted(source, tmp_path / "hf", "hf", "--hf-config", config)

    model = transformers.LlamaForCausalLM.from_pretrained(output).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(30).view(3, 10) % 51).logits
    assert equal(logits, torch.load(trained / name / "logits.pt", weights_only=True))


@pytest.mark.filterwarnings("ignore")
def test_the_tied_alias_is_left_out_and_the_config_is_right(trained, tmp_path) -> None:
    """As transformers itself would have saved it."""
    from safetensors.torch import load_file

    kept = {}
    for name in ("untied", "tied"):
        output = tmp_path / name
        source, config = trained / name / "checkpoint", trained / name / "config"
        converted(source, output, "hf", "--hf-config", config)
        kept[name] = set(load_file(output / "model.safetensors"))
        written = json.loads((output / "config.json").read_text())
        assert written.get("dtype", written.get("torch_dtype")) == "float32"
    assert kept["untied"] - kept["tied"] == {"lm_head.weight"}
