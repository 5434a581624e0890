"""Options of param groups that are tensors: `lr=torch.tensor(…)`, as compiled optimizers want."""

import pytest
import torch

from tests.checkpoint import read_back
from tests.checkpoint.command import converted, run


def checkpoint(path, lr: float) -> None:
    group = {"lr": torch.tensor(lr), "betas": (0.9, 0.95), "params": ["a"]}
    state = {"a": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)}}
    optim = {"state": state, "param_groups": [group]}
    torch.save({"model": {"a": torch.ones(3)}, "optim": optim}, path)


def test_a_learning_rate_that_is_a_tensor_reaches_every_target(tmp_path) -> None:
    """As a tensor, with its value."""
    checkpoint(tmp_path / "a.pt", 0.1)

    one = read_back.torch_file(converted(tmp_path / "a.pt", tmp_path / "o.pt", "torch"))
    dcp = read_back.dcp(converted(tmp_path / "a.pt", tmp_path / "dcp", "dcp"))
    for found in (one, dcp):
        assert torch.equal(found["optim"]["param_groups"][0]["lr"], torch.tensor(0.1))


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_compare_reads_options_that_are_tensors(to, tmp_path) -> None:
    """Two learning rates differ though both are 0-dim float32."""
    for name, lr in (("a", 0.1), ("b", 0.2)):
        checkpoint(tmp_path / f"{name}.pt", lr)
    same = converted(tmp_path / "a.pt", tmp_path / "same", to)
    other = converted(tmp_path / "b.pt", tmp_path / "other", to)

    assert run("compare-ckpt", tmp_path / "a.pt", same).code == 0
    outcome = run("compare-ckpt", tmp_path / "a.pt", other)
    assert outcome.code == 1 and "lr" in outcome.out
