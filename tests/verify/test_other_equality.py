"""
Pairs that cannot be equal to the bit, and are right: they pass within measured noise. And
`--same-init`, which makes pairs comparable that initialise differently.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_migrate.verify.experiment import Experiment, Side, run
from fsdp_migrate.verify.launchers.torchrun import Torchrun
from fsdp_migrate.verify.verdict import Kind
from tests.verify.launches import SCRIPTS, Bench, Run

CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
BY_HAND = """\
        squares = [p.grad.to_local().float().pow(2).sum() for p in model.parameters()]
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        for p in model.parameters():
            p.grad.mul_(torch.clamp(0.5 / (total.sqrt() + 1e-6), max=1.0))
"""
SHARD = "            fully_shard(module, **kwargs)\n"
COMPILED = '            module.compile(backend="aot_eager")\n' + SHARD
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
MODES = ("exact", "native")


def _variant(folder: Path, name: str, old: str, new: str) -> Path:
    text = (SCRIPTS / "fsdp2.py").read_text()
    assert old in text
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text((SCRIPTS / "model.py").read_text())
    (folder / name).write_text(text.replace(old, new))
    return folder / name


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("other")
    variants = {
        "compiled": _variant(folder / "s", "compiled.py", SHARD, COMPILED),
        "clipped by hand": _variant(folder / "s", "by_hand.py", CLIP, BY_HAND),
    }
    runs = []
    for precision, args in PRECISIONS.items():
        runs.append(Run(f"before {precision}", SCRIPTS / "fsdp1.py", args, True, MODES))
        runs += [Run(f"{n} {precision}", s, args, modes=MODES) for n, s in variants.items()]
    return Bench(folder / "runs", runs)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", ["compiled", "clipped by hand"])
def test_a_rounding_is_told_from_a_bug(bench: Bench, variant: str, precision: str) -> None:
    """Other kernels, and a norm added up in another order, are not bugs."""
    verdict = bench.parity(f"before {precision}", f"{variant} {precision}").verdict

    assert verdict.kind is Kind.PASS, verdict.sentence


def test_the_first_runs_weights_are_replayed(tmp_path: Path) -> None:
    """A second script that draws other weights starts from the first's; without, it fails."""
    other = _variant(tmp_path / "s", "seed.py", "torch.manual_seed(0)", "torch.manual_seed(5)")
    sides = Side(SCRIPTS / "fsdp1.py", ("--flat",)), Side(other)
    modes = ("exact",)

    plain = run(Experiment(*sides, tmp_path / "plain", 3, modes=modes), Torchrun()).verdict
    same = Experiment(*sides, tmp_path / "same", 3, modes=modes, same_init=True)

    assert (plain.kind, plain.check) == (Kind.FAIL, "start")
    assert run(same, Torchrun()).verdict.title == "PASS (bitwise)"
