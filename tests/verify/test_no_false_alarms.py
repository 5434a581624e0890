"""
Correct migrations must pass: real scripts as rewrite-code migrates them, and the tests' own pair
under every strategy, with clipping active, dropout on, and two precisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_migrate.cli.migrated import migrated
from fsdp_migrate.errors import MigrateError
from fsdp_migrate.verify.experiment import usable
from tests.verify.launches import SCRIPTS, Bench, Run

FIXTURES = Path(__file__).parents[2] / "fixtures" / "scripts"
SCRIPT_ARGS: dict[str, tuple[str, ...]] = {
    "accumulate_checkpointed": (),
    "config_driven": (),
    "dotted_grad_op": (),
    "helper_kwargs": (),
    "hsdp_dcp": (),
    "inspect_params": (),
    "lora_frozen": (),
    "meta_start": (),
    "policy_reference": (),
    "resume_full": (),
    "sticky_legacy": (),
    "trainer_class": (),
    "transformer_policy": (),
    "two_optimizers": (),
    "wrap_size_scaler": (),
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "SHARD_GRAD_OP": ("--strategy", "SHARD_GRAD_OP"),
    "NO_SHARD": ("--strategy", "NO_SHARD"),
    "flat, accumulating": ("--flat", "--accumulate", "3"),
    "frozen part": ("--freeze",),
}
PRECISIONS = {"fp32": (), "bf16": ("--bf16",)}
ENGINES = ("accelerated", "trainer")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("correct")
    return Bench(folder / "runs", [*_scripts(folder), *_strategies(STRATEGIES), *_engines(folder)])


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    strategies = {"HYBRID_SHARD": ("--strategy", "HYBRID_SHARD"), "FULL_SHARD": ()}
    return Bench(tmp_path_factory.mktemp("four"), _strategies(strategies, ("exact", "native")), 4)


def _scripts(folder: Path) -> Iterator[Run]:
    for name, args in SCRIPT_ARGS.items():
        script = FIXTURES / f"{name}.py"
        try:
            second = migrated(script, folder / name)
        except MigrateError:
            continue  # that script's own test says so
        yield Run(f"before {name}", script, args)
        yield Run(f"after {name}", second, args)


def _strategies(
    strategies: dict[str, tuple[str, ...]], modes: tuple[str, ...] = ("exact",)
) -> Iterator[Run]:
    for name, args in strategies.items():
        for precision, extra in PRECISIONS.items():
            script = SCRIPTS / "fsdp1.py"
            yield Run(f"before {name} {precision}", script, (*args, *extra), True, modes)
            script = SCRIPTS / "fsdp2.py"
            yield Run(f"after {name} {precision}", script, (*args, *extra), modes=modes)


def _engines(folder: Path) -> Iterator[Run]:
    """accelerate and the Trainer: the version of FSDP is a number in their configuration."""
    for name in ENGINES:
        script = SCRIPTS / f"{name}.py"
        second = folder / "engines" / script.name
        second.parent.mkdir(exist_ok=True)
        (second.parent / "model.py").write_text((SCRIPTS / "model.py").read_text())
        second.write_text(script.read_text().replace("VERSION = 1", "VERSION = 2"))
        yield Run(f"before {name}", script)
        yield Run(f"after {name}", second)


def _passes(bench: Bench, name: str) -> None:
    assert bench.traces(f"before {name}"), "rewrite-code could not migrate it"
    usable(bench.traces(f"before {name}"))
    verdict = bench.parity(f"before {name}", f"after {name}").verdict

    assert verdict.title == "PASS (bitwise)", verdict.sentence


@pytest.mark.parametrize("name", SCRIPT_ARGS)
def test_a_script_as_rewrite_code_migrates_it(bench: Bench, name: str) -> None:
    """FSDP1 idioms of many projects, none of which the tests were written around."""
    _passes(bench, name)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_script_moved_by_hand(bench: Bench, strategy: str, precision: str) -> None:
    """Tied weights, dropout, a buffer, uneven shards, clipping at every step."""
    _passes(bench, f"{strategy} {precision}")


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_that_wrap_the_loop(bench: Bench, engine: str) -> None:
    """On CPUs they leave FSDP out by themselves, and then nothing would be compared."""
    _passes(bench, engine)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "FULL_SHARD"])
def test_four_ranks(four_ranks: Bench, strategy: str, precision: str) -> None:
    """Sums of four numbers depend on their order: exact mode fixes it, native allows for it."""
    _passes(four_ranks, f"{strategy} {precision}")
