"""
What reads plausibly may still train differently: rewritten code, run on two ranks, bit for bit.

Beside the whole scripts of test_scripts.py these are the corners: buffers under mixed precision,
units chosen by several policies, weights made on the meta device, and state on its way in and out.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from fsdp_migrate.rewrite import rewrite_source
from tests.rewrite import ranks

HEAD = """\
import contextlib, copy, functools, json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel as FSDP,
    MixedPrecision, ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy, _or_policy, lambda_auto_wrap_policy, size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

CPU = torch.device("cpu")
lines = []


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.linspace(0.1, 1.3, width))

    def forward(self, x, table):
        hidden = (x * self.scale + table).to(x.dtype)
        return x + self.down(torch.relu(self.up(hidden)))


class Net(nn.Module):
    def __init__(self, width=7):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 11)

    def forward(self, ids):
        x = self.embed(ids)
        table = torch.sin(torch.arange(7, dtype=torch.float32)) / 3
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


def step(model, optimizer, context=None, update=True):
    ids = torch.randint(0, 11, (3, 5))
    with context or contextlib.nullcontext():
        loss = nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
    note(loss.item())
    if update:
        optimizer.step()
        optimizer.zero_grad()


def note(value):
    lines.append(json.dumps({"loss": float(value).hex()}))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""
TAIL = """
with open(os.path.join(os.environ["METRICS_DIR"], f"rank{rank}.jsonl"), "w") as file:
    file.write("\\n".join(lines))
dist.barrier()
"""
CASES = {
    "bf16 with buffers and a table": """
        mp = MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        )
        model = FSDP(
            Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=mp, device_id=CPU
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        for _ in range(4):
            step(model, optimizer)
    """,
    "policies, frozen parts, an optimizer built first": """
        def trainable(module):
            return not list(module.children()) and module.weight.requires_grad

        model = Net()
        model.blocks[0].requires_grad_(False)
        grouped = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-2}]
        optimizer = torch.optim.AdamW(grouped)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        policies = [
            functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ]
        model = FSDP(
            model,
            auto_wrap_policy=functools.partial(_or_policy, policies=policies),
            device_id=CPU,
            use_orig_params=True,
        )
        wrap = functools.partial(
            FSDP,
            auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=100),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            device_id=CPU,
        )
        other = wrap(Net())
        second = torch.optim.AdamW(other.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        for _ in range(3):
            step(model, optimizer)
            scheduler.step()
            step(other, second)
    """,
    "weights made on the meta device": """
        def init(module):
            module.to_empty(device=CPU, recurse=False)
            with torch.no_grad():
                for param in module.parameters(recurse=False):
                    param.normal_(std=0.3)
                for buffer in module.buffers(recurse=False):
                    buffer.fill_(0.5)

        with torch.device("meta"):
            model = Net()
            plain = nn.Sequential(nn.Embedding(11, 7), nn.Linear(7, 9), nn.Linear(9, 11))
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            param_init_fn=init,
            device_id=CPU,
        )
        by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
        plain = FSDP(plain, auto_wrap_policy=by_size, device_id=CPU)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        second = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        for _ in range(3):
            step(model, optimizer)
            step(plain, second)
    """,
    "accumulation, whole parameters, state in and out": """
        model = FSDP(
            Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=CPU, use_orig_params=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(rank)
        for micro in range(4):
            last = micro == 3
            context = model.no_sync if not last else contextlib.nullcontext
            step(model, optimizer, context(), update=last)
        with FSDP.summon_full_params(model, writeback=False):
            note(sum(param.double().sum() for param in model.parameters()))
        with FSDP.summon_full_params(model), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
        step(model, optimizer)
        config = FullStateDictConfig(offload_to_cpu=False)
        optim_config = FullOptimStateDictConfig(offload_to_cpu=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config):
            state = copy.deepcopy(model.state_dict())
            optim = copy.deepcopy(FSDP.optim_state_dict(model, optimizer))
        note(sum(value.double().sum() for value in state.values()))
        step(model, optimizer)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config):
            model.load_state_dict(state)
            flat = FSDP.optim_state_dict_to_load(model, optimizer, optim)
            optimizer.load_state_dict(flat)
        step(model, optimizer)
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        model.load_state_dict(model.state_dict())
        optim = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=optim)
        )
        step(model, optimizer)
    """,
}


@pytest.mark.parametrize("case", CASES)
def test_trains_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Both versions run as they are; nothing is left to do by hand; every loss is the same."""
    before = HEAD + dedent(CASES[case]) + TAIL
    result = rewrite_source(before)
    assert not [site for site in result.sites if site.state == "todo"]
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(result.after)

    old = ranks.run(tmp_path / "before.py", tmp_path / "old")
    new = ranks.run(tmp_path / "after.py", tmp_path / "new")

    assert [one.series("loss") for one in new] == [one.series("loss") for one in old]
    assert all(len(one.series("loss")) >= 4 for one in new)
    assert all(one.fsdp1_modules == 0 < one.fsdp2_modules for one in new)
    assert all(optim.plain == 0 < optim.dtensors for one in new for optim in one.optimizers)
