"""The arithmetic behind bench's columns, against formulas and data sheets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from fsdp_migrate.errors import Unsupported
from fsdp_migrate.verify.bench import chart, flops, outcome, peaks, tensor_parallel
from fsdp_migrate.verify.bench.blocks import blocks_of, freeze_first_half
from fsdp_migrate.verify.bench.models import model_of
from fsdp_migrate.verify.bench.row import Ranks
from fsdp_migrate.verify.bench.rows import fsdp1, hsdp
from fsdp_migrate.verify.bench.setup import Setup
from fsdp_migrate.verify.bench.table import table
from tests.verify.test_bench import llama


def setup(**changes: Any) -> Setup:
    plain: dict[str, Any] = {
        "hf_config": None,
        "factory": None,
        "block": None,
        "vocab_size": None,
        "batch": 2,
        "seq_len": 32,
        "dtype": "fp32",
        "steps": 3,
        "warmup": 1,
        "ranks": 4,
        "device": "cpu",
        "seed": 0,
    }
    return Setup(**{**plain, **changes})


def test_counted_flops_are_those_of_the_usual_formula(tmp_path: Path) -> None:
    """6 per weight of a matrix product, 12 x layers x width x length for attention."""
    chosen = setup(hf_config=llama(tmp_path))
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path))
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n
    )

    counted = flops.per_token(model_of(chosen), chosen, frozen=False)

    assert counted == 6 * matrices + 12 * 2 * 64 * chosen.seq_len


def test_a_frozen_half_costs_less(tmp_path: Path) -> None:
    """Nothing below the first trained layer is differentiated."""
    chosen = setup(hf_config=llama(tmp_path))
    source = model_of(chosen)

    assert flops.per_token(source, chosen, frozen=True) < 0.8 * flops.per_token(
        source, chosen, frozen=False
    )


@pytest.mark.parametrize(
    ("device", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H100", "bf16", None),
        ("CPU", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_a_peak_is_of_exactly_the_named_device(device: str, dtype: str, tera: float | None) -> None:
    """An unknown device has no peak: another one's would be a wrong MFU."""
    expected = None if tera is None else tera * 1e12

    assert peaks.peak(device, dtype) == expected


def figures(losses: list[list[float]], norm: float = 1.0) -> outcome.Figures:
    return outcome.Figures(
        device="CPU",
        tokens_per_second=1.0,
        step_median=1.0,
        step_quartiles=(1.0, 1.0),
        peak_allocated=None,
        peak_reserved=None,
        host_rss=1,
        flops_per_token=None,
        flops_reason=None,
        losses=tuple(map(tuple, losses)),
        gradient_norm=norm,
    )


REFERENCE = figures([[2.0, 1.5], [2.2, 1.7]])


@pytest.mark.parametrize(
    ("mine", "bitwise", "holds"),
    [
        (REFERENCE, True, True),
        (figures([[2.0, 1.5, 1.0], [2.2, 1.7, 1.1]]), True, True),  # more warm-up steps
        (figures([[2.2, 1.7], [2.0, 1.5]]), False, True),  # other data on each rank, same mean
        (figures([[2.0, 1.5], [2.2, 1.7001]]), False, False),
        (figures([[2.0, 1.5], [2.2, 1.7]], norm=4.0), True, False),  # summed, not averaged
        (figures([[2.0, math.nan], [2.2, 1.7]]), False, False),
        (figures([[2.0, 1.5], [2.2, 1.7]], norm=math.nan), True, False),
    ],
)
def test_parity_needs_losses_and_gradient_norm(
    mine: outcome.Figures, bitwise: bool, holds: bool
) -> None:
    """Losses alone can't show gradients that are too large by a factor; NaN is never equal."""
    parity = outcome.parity(mine, REFERENCE, "fp32")

    assert (parity.bitwise, parity.holds) == (bitwise, holds)


@pytest.mark.parametrize(
    ("status", "well"),
    [("cannot run", True), ("out of memory", True), ("failed", False), ("timed out", False)],
)
def test_what_the_hardware_cannot_hold_is_a_result_and_a_crash_is_a_failure(
    status: str, well: bool
) -> None:
    """The exit code follows from it."""
    ran = outcome.Outcome(fsdp1.ROW, "ran", figures=REFERENCE)
    other = outcome.Outcome(hsdp.ROW, status, "a reason")

    assert table(setup(factory="m:f"), [ran, other], None).all_well == well


def test_a_row_without_its_reference_has_no_ratio() -> None:
    """n/a, rather than a ratio to something else."""
    ran = outcome.Outcome(hsdp.ROW, "ran", figures=REFERENCE)

    (line,) = table(setup(factory="m:f"), [ran], None).lines

    assert (line.ratio, line.parity) == (None, None)


class FakeMesh:
    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 is not divisible"),
        ({"intermediate_size": 177}, "intermediate_size 177 is not divisible"),
        ({"vocab_size": 255}, "vocab_size 255 is not divisible"),
    ],
)
def test_a_llama_that_cannot_be_cut_evenly_is_refused(
    tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    """With the sizes, before anything is cut."""
    config = LlamaConfig.from_pretrained(llama(tmp_path, **changes))
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(Unsupported, match=reason):
        tensor_parallel.cut(model, blocks_of(model, None), FakeMesh())  # type: ignore[arg-type]


def test_a_block_with_parameters_the_plan_does_not_know_is_refused() -> None:
    """Qwen3 normalises inside the heads: cut by Llama's plan it would train wrongly in silence."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config)

    with pytest.raises(Unsupported, match=r"self_attn\.k_norm, self_attn\.q_norm"):
        tensor_parallel.cut(model, blocks_of(model, None), FakeMesh())  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_hsdp_needs_two_groups_of_two(ranks: int) -> None:
    """A group of one would be DDP under another name."""
    place = Ranks(torch.device("cpu"), 0, ranks, torch.float32)

    with pytest.raises(Unsupported, match=f"{ranks} ranks"):
        hsdp.parallelize(torch.nn.Linear(1, 1), (), place)


def test_the_first_half_is_frozen_in_the_model_s_own_order(tmp_path: Path) -> None:
    """Embedding and the first of two layers; the norm and the head behind them are trained."""
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(llama(tmp_path)))

    freeze_first_half(model, None)

    frozen = {
        n.split(".layers.")[-1][0] for n, p in model.named_parameters() if not p.requires_grad
    }
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert frozen == {"m", "0"}  # model.embed_tokens, layers.0
    assert {"model.norm.weight", "lm_head.weight"} <= trained


def test_the_chart_keeps_the_place_of_a_row_that_did_not_run(tmp_path: Path) -> None:
    """With its reason instead of a bar; and a GPU's memory is told as allocated and reserved."""
    ran = replace(REFERENCE, peak_allocated=2 << 30, peak_reserved=3 << 30, host_rss=None)
    outcomes = [
        outcome.Outcome(hsdp.ROW, "cannot run", "needs more ranks; see some/log"),
        outcome.Outcome(fsdp1.ROW, "ran", figures=ran),
    ]
    drawn = table(setup(factory="m:f", device="cuda"), outcomes, None)
    speed, memory = Figure().subplots(1, 2)
    chart._speed(speed, drawn)
    chart._memory(memory, drawn)
    chart.draw(drawn, tmp_path / "bench.png")

    said = {text.get_text().strip(): text.get_position()[1] for text in speed.texts}
    assert said["cannot run: needs more ranks"] == 0
    assert said["1  1.00x"] == 1
    assert [text.get_text().strip() for text in memory.texts] == ["2.00 / 3.00"]
    assert (tmp_path / "bench.png").stat().st_size > 5000
