"""inspect-ckpt, compare-ckpt, --help and --json."""

import json
import shutil

import pytest
import torch

from tests.checkpoint.cases import ROOT
from tests.checkpoint.command import converted, refused, run

CASE = ROOT / "2.13.0" / "w3_full_block_orig"
LOCAL = ROOT / "2.13.0" / "w3_full_block_orig_tied" / "local_rank"


@pytest.mark.parametrize("command", ["convert-ckpt", "inspect-ckpt", "compare-ckpt"])
def test_help_names_every_option(command) -> None:
    """And never needs a checkpoint."""
    outcome = run(command, "--help")

    assert outcome.code == 0
    for option in ("--model", "--hf-config", "--layout", "--json"):
        assert option in outcome.out


@pytest.mark.parametrize("arguments", [[], ["--to", "hf"], ["a"], ["a", "b", "c", "--to", "hf"]])
def test_wrong_usage_is_exit_2(arguments) -> None:
    """Too few, too many."""
    assert run("convert-ckpt", *arguments).code == 2


def test_inspect_says_what_a_sharded_checkpoint_is() -> None:
    """Format, ranks, sharding, parameters and optimizer coverage."""
    outcome = run("inspect-ckpt", CASE / "sharded_rank")

    assert outcome.code == 0
    for text in ("rank", "3", "36 tensors", "state for 33 of 33 parameters", "float32", "int64"):
        assert text in outcome.out


def test_inspect_as_json_has_the_same_facts() -> None:
    """One object on stdout."""
    found = run("inspect-ckpt", CASE / "sharded_rank", "--json").json

    assert found["world_size"] == 3
    assert found["coverage"] == [33, 33]
    assert sum(count for count, _, _ in found["dtypes"].values()) == 37
    assert found["dtypes"]["int64"] == [1, 1, 8]
    truth = torch.load(CASE / "truth.pt", weights_only=True)
    listed = run("inspect-ckpt", CASE / "sharded_rank", "--json", "--tensors").json["tensors"]
    assert {t["name"]: tuple(t["shape"]) for t in listed} == {
        name: tuple(value.shape)
        for name, value in (truth["params"] | truth["buffers"]).items()
        if name != "model.rotary_emb.cached"
    }


def test_inspect_lists_tensors_on_demand() -> None:
    """One line a tensor."""
    plain = run("inspect-ckpt", CASE / "full" / "pytorch_model_fsdp.bin").out
    listed = run("inspect-ckpt", CASE / "full" / "pytorch_model_fsdp.bin", "--tensors").out

    assert "model.conv" not in plain
    assert "model.conv  float32 5x2x3" in listed


def test_inspect_shows_flat_parameters_without_a_layout() -> None:
    """It says what is missing, and is no error: looking is always possible."""
    outcome = run("inspect-ckpt", LOCAL)

    assert outcome.code == 0
    assert "flat" in outcome.out and "--model" in outcome.out


def test_an_emitted_layout_does_in_place_of_the_model(tmp_path) -> None:
    """From the model once, from the file ever after: the same conversion."""
    model = ["--model", "tests.checkpoint.factories:tied"]
    outcome = run("inspect-ckpt", LOCAL, *model, "--emit-layout", tmp_path / "layout.json")
    assert outcome.code == 0, outcome.err

    one = converted(LOCAL, tmp_path / "one", "dcp", *model)
    other = converted(LOCAL, tmp_path / "other", "dcp", "--layout", tmp_path / "layout.json")
    assert run("compare-ckpt", one, other).code == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "x"}', "not json", '{"parameters": 3}']
)
def test_a_layout_that_is_none_is_refused(text, tmp_path) -> None:
    """Whatever it is."""
    (tmp_path / "layout.json").write_text(text)

    refused(
        3, "convert-ckpt", LOCAL, tmp_path / "o", "--to", "hf", "--layout", tmp_path / "layout.json"
    )


@pytest.mark.parametrize(
    ("code", "factory"),
    [
        (2, "nothing"),
        (2, "no.such.module:x"),
        (2, "tests.checkpoint.factories:nothing"),
        (3, "tests.checkpoint.factories:plain"),
        (3, "tests.checkpoint.resume_ranks:Net"),
        (2, "tests.checkpoint.cases:ROOT"),
    ],
)
def test_a_wrong_model_is_refused(code, factory, tmp_path) -> None:
    """Not found, not a model, or a model whose sizes do not fit the file."""
    refused(code, "convert-ckpt", LOCAL, tmp_path / "o", "--to", "hf", "--model", factory)
    assert not (tmp_path / "o").exists()


def test_errors_are_json_too(tmp_path) -> None:
    """One object on stdout with kind, message and exit code; nothing on stderr."""
    outcome = run("convert-ckpt", LOCAL, tmp_path / "o", "--to", "hf", "--json")

    assert outcome.code == 5
    error = outcome.json["error"]
    assert (
        error["exit_code"] == 5
        and error["kind"] == "OpenQuestion"
        and "--model" in error["message"]
    )
    assert outcome.err == ""


def test_a_conversion_reports_as_json(tmp_path) -> None:
    """Exactly one object, and a manifest with every tensor's hash."""
    outcome = run("convert-ckpt", CASE / "sharded_rank", tmp_path / "o", "--to", "dcp", "--json")

    assert outcome.code == 0
    assert outcome.json["model_tensors"] == 37
    manifest = json.loads((tmp_path / "o" / "fsdp_migrate.json").read_text())
    assert manifest["verified"] is True
    assert len(manifest["tensors"]) == 37 + 33 * 3
    assert all(len(hashed) == 32 for hashed in manifest["tensors"].values())


def test_the_same_input_gives_the_same_bytes(tmp_path) -> None:
    """No time, no host, no order of threads in what is written."""
    for to in ("dcp", "hf", "torch"):
        one, other = (
            converted(CASE / "sharded_rank", tmp_path / f"{to}{n}" / "o", to) for n in range(2)
        )
        for path in [one] if one.is_file() else [p for p in one.rglob("*") if p.is_file()]:
            twin = other / path.relative_to(one) if one.is_dir() else other
            assert path.read_bytes() == twin.read_bytes(), path


def changed(folder, target, change):
    """A copy of a full checkpoint with one thing different."""
    tree = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    optimizer = torch.load(folder / "optimizer.bin", weights_only=True)
    change(tree, optimizer)
    target.mkdir()
    torch.save(tree, target / "model.bin")
    torch.save(optimizer, target / "optimizer.bin")
    return target


def _value(tree, _) -> None:
    tree["model.conv"][2, 1, 1] += 1e-7 + tree["model.conv"][2, 1, 1].abs() * 1e-3


def _zero_sign(tree, _) -> None:
    tree["model.conv"][0, 0, 0] = -0.0


def _dtype(tree, _) -> None:
    tree["model.conv"] = tree["model.conv"].double()


def _shape(tree, _) -> None:
    tree["model.conv"] = tree["model.conv"].view(10, 3)


def _missing(tree, _) -> None:
    del tree["model.bn.running_mean"]


def _extra(tree, _) -> None:
    tree["more"] = torch.ones(1)


def _state(_, optimizer) -> None:
    optimizer["state"]["model.one"]["exp_avg"] += 1


def _step(_, optimizer) -> None:
    optimizer["state"]["model.one"]["step"] += 1


def _option(_, optimizer) -> None:
    optimizer["param_groups"][0]["lr"] *= 2


DIFFERENT = {
    _value: ("model.conv", "value", "[2, 1, 1]"),
    _dtype: ("model.conv", "dtype", "float64"),
    _shape: ("model.conv", "shape", "[10, 3]"),
    _missing: ("model.bn.running_mean", "only in A", ""),
    _extra: ("more", "only in B", ""),
    _state: ("model.one.exp_avg", "value", ""),
    _step: ("model.one.step", "value", ""),
    _option: ("model.", "option", "lr"),
}


@pytest.mark.parametrize("change", DIFFERENT, ids=lambda change: change.__name__)
def test_compare_finds_and_names_a_difference(change, tmp_path) -> None:
    """Exit 1 with name, kind and place, as text and as JSON, across formats."""
    original = changed(CASE / "full", tmp_path / "a", lambda *_: None)
    other = changed(CASE / "full", tmp_path / "b", change)
    dcp = converted(original, tmp_path / "dcp", "dcp", "--target-torch", "2.13.0")
    name, kind, detail = DIFFERENT[change]

    for one in (original, dcp):
        outcome = run("compare-ckpt", one, other)
        assert outcome.code == 1
        lines = [line for line in outcome.out.splitlines() if name in line and kind in line]
        assert lines and detail in lines[0]
    found = run("compare-ckpt", original, other, "--json")
    assert found.code == 1 and found.json["same"] is False
    assert {d["kind"] for d in found.json["differences"]} == {kind}


def test_compare_tells_the_sign_of_zero(tmp_path) -> None:
    """Bit for bit means so."""
    one = changed(CASE / "full", tmp_path / "a", lambda tree, _: tree["model.conv"][0].zero_())
    other = tmp_path / "b"
    shutil.copytree(one, other)
    tree = torch.load(other / "model.bin", weights_only=True)
    _zero_sign(tree, None)
    torch.save(tree, other / "model.bin")

    assert run("compare-ckpt", one, other).code == 1


def test_compare_of_equal_nans_is_the_same(tmp_path) -> None:
    """Values are compared by their bits, so a NaN is itself."""
    for name in "ab":
        torch.save({"w": torch.tensor([float("nan"), 1.0])}, tmp_path / f"{name}.pt")

    outcome = run("compare-ckpt", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert outcome.code == 0 and outcome.json == {"same": True, "compared": 1, "differences": []}


def test_a_checkpoint_without_the_optimizer_of_the_other_differs(tmp_path) -> None:
    """Unless only the models are asked about."""
    hf = converted(CASE / "sharded_rank", tmp_path / "hf", "hf")

    assert run("compare-ckpt", CASE / "sharded_rank", hf).code == 1
    assert run("compare-ckpt", hf, CASE / "sharded_rank").code == 1
    assert run("compare-ckpt", CASE / "sharded_rank", hf, "--no-optimizer").code == 0


def test_compare_of_a_missing_checkpoint_is_exit_3(tmp_path) -> None:
    """Not "they differ"."""
    refused(3, "compare-ckpt", CASE / "sharded_rank", tmp_path / "missing")
