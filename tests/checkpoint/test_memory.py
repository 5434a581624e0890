"""Memory stays small however large the checkpoint is; torch stays away where it is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
MB = 1 << 20
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(code: str, *arguments: str | Path) -> str:
    """What `code` prints, run by a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=ENV, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FULL_STATE_DICT file of 256 MB, model and optimizer; written by torch."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (8 * MB,), generator=generator)
    model = {f"layers.{n}.weight": words.view(torch.bfloat16).view(4096, 8192) + n for n in (0, 1)}
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": words.view(torch.float32).view(2048, 8192)}
        for name in model
    }
    model |= {"small.weight": torch.arange(5.0)}
    groups = [{"lr": 1e-3, "params": list(model)}]
    path = tmp_path_factory.mktemp("full") / "checkpoint.pt"
    state_copy = {k: {n: t.clone() for n, t in v.items()} for k, v in state.items()}
    torch.save({"model": model, "optim": {"state": state_copy, "param_groups": groups}}, path)
    return path


# RLIMIT_DATA bounds what the process itself may allocate, and no file it maps.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), int(sys.argv[1])))
sys.argv = ["fsdp-migrate", *sys.argv[2:]]
from fsdp_migrate.cli import main
main()
"""


@pytest.mark.parametrize("target", ["hf", "dcp", "torch"])
def test_converting_needs_far_less_memory_than_the_checkpoint(
    checkpoint: Path, tmp_path: Path, target: str
) -> None:
    """Written and verified under a hard limit of less than half of the file's size."""
    output = tmp_path / "output"

    run(LIMITED, str(112 * MB), "convert-ckpt", checkpoint, output, "--to", target)

    if target == "hf":
        written = load_file(output / "model.safetensors")
        saved = torch.load(checkpoint, mmap=True)["model"]
        assert set(written) == set(saved)
        for name, tensor in saved.items():
            assert torch.equal(written[name].view(torch.int8), tensor.view(torch.int8))


def test_the_limit_would_stop_a_conversion_that_loads(checkpoint: Path) -> None:
    """The same limit is too small for reading the file into memory, so the test above can fail."""
    code = LIMITED.partition("sys.argv =")[0] + "data = open(sys.argv[2], 'rb').read()"
    with pytest.raises(AssertionError, match="MemoryError"):
        run(code, str(112 * MB), checkpoint)


MODULES = """
import sys
from fsdp_migrate.cli import main
sys.argv = ["fsdp-migrate", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *(name for name in ("torch", "numpy", "transformers") if name in sys.modules))
"""


@pytest.mark.parametrize("target", ["hf", "dcp", "torch"])
def test_a_conversion_that_keeps_dtypes_starts_without_torch(
    checkpoint: Path, tmp_path: Path, target: str
) -> None:
    """torch alone takes a second and 200 MB: only a cast, or a model's own code, may import it."""
    printed = run(MODULES, "convert-ckpt", checkpoint, tmp_path / "output", "--to", target)

    assert printed.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("words", [["--help"], ["convert-ckpt", "--help"], ["--version"]])
def test_help_imports_nothing_large(words: list[str]) -> None:
    """`--help` answers at once."""
    printed = run(MODULES, *words)

    assert printed.splitlines()[-1] == "loaded:"


def test_the_benchmark_runs(tmp_path: Path) -> None:
    """Every row on a tiny model; what it measures is for people, what it does is checked here."""
    bench = ROOT / "benchmarks" / "bench_convert.py"
    command = [sys.executable, str(bench), "--gb", "0.001", "--repeats", "1"]

    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--rows", "links,local,large"],
        env=ENV, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("must") == 5
    assert list(tmp_path.iterdir()) == []
