"""Every row of `fsdp-migrate bench`, as the real command runs it: four ranks on gloo."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

COMMAND = (sys.executable, "-m", "fsdp_migrate", "bench")
RANKS, BATCH, SEQ_LEN, STEPS, WARMUP = 4, 2, 32, 3, 1
ROWS = [
    "ddp",
    "fsdp1",
    "fsdp2",
    "fsdp2-no-reshard",
    "fsdp2-compile",
    "fsdp2-tp",
    "hsdp",
    "fsdp2-offload",
    "fsdp1-frozen",
    "fsdp2-frozen",
]


def bench(*arguments: object, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(__file__).parent,
        # One process compiles per rank: a pool each would import torch a dozen times over.
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "NO_COLOR": "1"},
    )


def llama(folder: Path, **changes: Any) -> Path:
    config = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    LlamaConfig(**{**config, **changes}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """All rows, once, for all the tests here."""
    done = bench(
        *("--hf-config", llama(folder / "model"), "--device", "cpu", "--dtype", "fp32"),
        *("--nproc-per-node", RANKS, "--batch", BATCH, "--seq-len", SEQ_LEN),
        *("--steps", STEPS, "--warmup", WARMUP, "--out", folder / "out", "--json"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def row(result: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [line for line in result["rows"] if line["name"] == name]
    return found


def losses(line: dict[str, Any]) -> list[float]:
    """The mean over ranks, step by step."""
    return [math.fsum(step) / RANKS for step in zip(*line["losses"], strict=True)]


def alone(config: Path, *, frozen: tuple[str, ...] = ()) -> list[float]:
    """The same training without bench, ranks or sharding: one process, the whole global batch."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(config)).float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1)
    rng = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(WARMUP + STEPS):
        uniform = torch.rand(RANKS * BATCH, SEQ_LEN, generator=rng, dtype=torch.float64)
        ids = (uniform**2 * 256).long()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs_and_trains_what_fsdp1_trains(result: dict[str, Any], name: str) -> None:
    """Four ranks, and the losses and the first gradient norm agree with the reference row."""
    line = row(result, name)

    assert line["status"] == "ran", line["reason"]
    assert line["parity"] in ("bitwise", "within noise")
    assert line["loss_difference"] < 1e-6
    assert line["gradient_norm_difference"] < 1e-6


def test_the_reference_itself_trains_as_one_plain_process_does(
    result: dict[str, Any], folder: Path
) -> None:
    """Parity among rows proves nothing if FSDP1's own row were wrong."""
    expected = alone(folder / "model")

    assert losses(row(result, "fsdp1")) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == WARMUP + STEPS  # something is learned


def test_frozen_rows_are_held_against_a_frozen_reference_that_is_right(
    result: dict[str, Any], folder: Path
) -> None:
    """The embedding and the first of two layers are frozen, and a plain process agrees."""
    frozen = alone(folder / "model", frozen=("model.embed_tokens", "model.layers.0"))

    assert losses(row(result, "fsdp1-frozen")) == pytest.approx(frozen, rel=1e-6)
    assert row(result, "fsdp2-frozen")["reference"] == "fsdp1-frozen"
    assert losses(row(result, "fsdp1"))[2] != pytest.approx(frozen[2], rel=1e-6)


def test_hsdp_is_bitwise_equal_to_itself_and_the_columns_are_consistent(
    result: dict[str, Any],
) -> None:
    """tokens/s follows from the median step; the ratio from the two rows' tokens/s."""
    reference = row(result, "fsdp1")
    for name in ROWS:
        line = row(result, name)
        tokens = BATCH * SEQ_LEN / line["step_median"]

        assert line["tokens_per_second_per_gpu"] == pytest.approx(tokens)
        assert line["step_q1"] <= line["step_median"] <= line["step_q3"]
        assert line["host_rss"] > 50 * 2**20
        assert line["peak_allocated"] is None and line["mfu"] is None
    ratio = row(result, "hsdp")["tokens_per_second_per_gpu"]
    ratio /= reference["tokens_per_second_per_gpu"]
    assert row(result, "hsdp")["ratio"] == pytest.approx(ratio)


def test_without_a_known_peak_mfu_says_what_to_pass(result: dict[str, Any]) -> None:
    """A CPU has no entry in the table of peaks."""
    assert "--peak-tflops" in result["mfu_note"]


def test_files_hold_the_same_table(result: dict[str, Any], folder: Path) -> None:
    """bench.json is what --json printed; bench.csv has a line a row; bench.png is a picture."""
    with (folder / "out" / "bench.csv").open() as file:
        lines = list(csv.DictReader(file))

    assert json.loads((folder / "out" / "bench.json").read_text()) == result
    assert [line["name"] for line in lines] == ROWS
    medians = [float(line["step_median"]) for line in lines]
    assert medians == [row(result, name)["step_median"] for name in ROWS]
    assert (folder / "out" / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_bf16_and_tied_embeddings_keep_parity(tmp_path: Path) -> None:
    """Tensor parallelism cuts the embedding and the head apart: they must stay one parameter."""
    done = bench(
        *("--hf-config", llama(tmp_path / "model", tie_word_embeddings=True), "--device", "cpu"),
        *("--nproc-per-node", 2, "--batch", 2, "--seq-len", 16, "--steps", 6, "--warmup", 1),
        *("--dtype", "bf16", "--rows", "ddp,fsdp1,fsdp2,fsdp2-tp", "--peak-tflops", "0.01"),
        *("--out", tmp_path / "out", "--json"),
    )
    result = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert row(result, "fsdp2")["parity"] == "bitwise"
    assert row(result, "ddp")["parity"] == "within noise"
    assert row(result, "fsdp2-tp")["parity"] == "within noise"
    assert 0 < row(result, "fsdp2")["mfu"] < 1
