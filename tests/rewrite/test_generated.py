"""Generated wrapping code: whatever the mix of arguments, names and places, the promises hold."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_migrate.rewrite import rewrite_source

ARGUMENTS = {
    "auto_wrap_policy": [
        "ModuleWrapPolicy({Block})",
        "functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, Head})",
        "functools.partial(size_based_auto_wrap_policy, min_num_params=100)",
        "functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: m in list(net.layers))",
        "policy",
        "ModuleWrapPolicy({Block}) if deep else None",
        "None",
    ],
    "sharding_strategy": [
        "ShardingStrategy.FULL_SHARD",
        "ShardingStrategy.SHARD_GRAD_OP",
        "ShardingStrategy.HYBRID_SHARD",
        "ShardingStrategy.NO_SHARD",
        "ShardingStrategy[name]",
        "strategies[name]",
        "getattr(ShardingStrategy, name)",
    ],
    "mixed_precision": [
        "MixedPrecision(param_dtype=torch.bfloat16)",
        "MixedPrecision(param_dtype=half, buffer_dtype=half) if amp else None",
        "mp",
        "None",
    ],
    "cpu_offload": [
        "CPUOffload(offload_params=True)",
        "CPUOffload(low)",
        "CPUOffload(True) if low else None",
        "None",
    ],
    "device_id": ["rank", "torch.cuda.current_device()", 'torch.device("cpu")', "device"],
    "backward_prefetch": ["BackwardPrefetch.BACKWARD_PRE", "BackwardPrefetch.BACKWARD_POST"],
    "sync_module_states": ["True", "low"],
    "param_init_fn": ["lambda m: m.to_empty(device=device, recurse=False)", "init", "None"],
    "process_group": ["group", "None"],
    "device_mesh": ["mesh"],
    "ignored_modules": ["None", "[net.head]"],
    "forward_prefetch": ["True", "False"],
    "limit_all_gathers": ["True"],
    "use_orig_params": ["True", "False"],
}
PLACES = [
    "net = {call}",
    "model = {call}",
    "self.model = {call}",
    "model: nn.Module = {call}",
    "model = torch.compile({call})",
    "models = [{call} for net in nets]",
    "make = lambda net: {call}",
    "model = {call} if shard else net",
    "use({call})",
    "return {call}",
    "if shard: net = {call}",
    "x = 1; net = {call}; y = 2",
]
HEADS = [
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
    "from torch.distributed.fsdp import FullyShardedDataParallel\nFSDP = FullyShardedDataParallel",
    "from torch.distributed.fsdp.fully_sharded_data_parallel import (\n"
    "    FullyShardedDataParallel as FSDP,\n)",
]
IMPORTS = """\
import functools
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
{head}

mp = MixedPrecision(param_dtype=torch.bfloat16)
strategies = {{"a": ShardingStrategy.FULL_SHARD, "b": ShardingStrategy.SHARD_GRAD_OP}}


def build(self, net, policy, name, amp, half, low, rank, device, group, mesh, shard, deep, init):
    {place}
"""


@st.composite
def scripts(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), unique=True, max_size=7))
    arguments = [f"{name}={draw(st.sampled_from(ARGUMENTS[name]))}" for name in names]
    module = draw(st.sampled_from(["net", "module=net", "net.to(device)"]))
    separator = draw(st.sampled_from([", ", ",\n        "]))
    how = draw(st.sampled_from(["call", "dict", "variable"]))
    before = ""
    if how == "call":
        inside = separator.join([module, *arguments])
    else:
        text = f"dict({', '.join(arguments)})"
        before = f"kwargs = {text}\n    " if how == "variable" else ""
        inside = f"{module}, **{'kwargs' if how == 'variable' else text}"
    place = draw(st.sampled_from(PLACES)).format(call=f"FSDP({inside})")
    return IMPORTS.format(head=draw(st.sampled_from(HEADS)), place=before + place)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts())
def test_promises_hold_on_any_wrapping_code(script: str) -> None:
    """
    The result compiles; a second run changes nothing; every FSDP call is in one state; what the
    report calls rewritten is gone, and nothing that lost its import is used.
    """
    result = rewrite_source(script)
    compile(result.after, "<after>", "exec")
    assert rewrite_source(result.after).after == result.after

    calls = [site for site in result.sites if site.api == "FullyShardedDataParallel"]
    assert calls
    if not any(site.state in ("todo", "skipped") for site in result.sites):
        for gone in ("FSDP(", "MixedPrecision(", "CPUOffload(", "ShardingStrategy"):
            assert gone not in result.after.replace("FSDP = ", "")
    assert undefined(result.after) <= undefined(script)


def undefined(text: str) -> set[str]:
    """Names of the FSDP world that are used without being imported or defined."""
    words = set(re.findall(r"\b[A-Za-z_]\w*\b", text))
    watched = {
        *("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "DeviceMesh"),
        *("CPUOffloadPolicy", "init_device_mesh", "StateDictOptions", "set_model_state_dict"),
        *("FSDP", "MixedPrecision", "CPUOffload", "ShardingStrategy", "dist", "dataclasses"),
        *("ModuleWrapPolicy", "transformer_auto_wrap_policy", "size_based_auto_wrap_policy"),
    }
    imports = re.findall(r"^\s*(?:from|import)\b(?:[^\n(]*\([^)]*\)|[^\n]*)", text, re.MULTILINE)
    bound = set(re.findall(r"\b[A-Za-z_]\w*\b", "\n".join(imports)))
    bound |= set(re.findall(r"^(\w+) = ", text, re.MULTILINE))
    return (words & watched) - bound


STATEMENTS = [
    "model.clip_grad_norm_(1.0)",
    "norm = model.clip_grad_norm_(max_norm=1.0, norm_type=2).item()",
    "log(f'{model.clip_grad_norm_(1.0):.3f}')",
    "with model.no_sync():\n    model(batch).backward()",
    "with model.no_sync() if step % 4 else contextlib.nullcontext():\n    model(batch).backward()",
    "context = model.no_sync if step else contextlib.nullcontext",
    "assert isinstance(model, FSDP) and not isinstance(other, (FSDP, DDP))",
    "inner = model.module if isinstance(model, FSDP) else model",
    "for part in FSDP.fsdp_modules(model): part.eval()",
    "scaler = ShardedGradScaler(enabled=fp16)",
    "with FSDP.summon_full_params(model, writeback=False):\n    print(model.weight)",
    "with FSDP.summon_full_params(model), torch.no_grad():\n    model.weight.mul_(2)",
    "out = model.generate(batch)",
    "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):\n"
    "    state = model.state_dict()\n    optim = FSDP.optim_state_dict(model, optimizer)",
    "with open(path) as file, FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n"
    "    state = {'model': model.state_dict()}\n    # here\n"
    "    model.load_state_dict(state['model'])",
    "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)",
    "torch.save(model.state_dict(), path)",
    "flat = FSDP.optim_state_dict_to_load(model, optimizer, state)\n"
    "optimizer.load_state_dict(flat)",
    "ema = copy.deepcopy(model)",
    "optimizer.load_state_dict(FSDP.optim_state_dict_to_load(state, model, optimizer))",
    "osd = FSDP.full_optim_state_dict(model, optimizer)",
    "apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))",
    "optimizer = torch.optim.AdamW(model.parameters())",
    "model.register_comm_hook(None, hook)",
    "FSDP.forward = patched",
    "kinds = {'a': ShardingStrategy.FULL_SHARD}",
    "if rank == 0: torch.save(state, path)",
]
TRAINING = """\
import contextlib
import copy
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    FullStateDictConfig, FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def train(model: {annotation}, optimizer, state, batch, step, path, rank, other, hook, fp16):
{before}
    model = FSDP(model{policy})
{after}
"""


@st.composite
def trainings(draw: st.DrawFn) -> str:
    def block(most: int) -> str:
        chosen = draw(st.lists(st.sampled_from(STATEMENTS), max_size=most)) or ["pass"]
        lines = [f"    {line}" for text in chosen for line in text.split("\n")]
        if draw(st.booleans()):
            lines = ["    for step in range(3):", *(f"    {line}" for line in lines)]
        return "\n".join(lines)

    policies = ["", ", auto_wrap_policy=ModuleWrapPolicy({Block})", ", **given"]
    policy = draw(st.sampled_from(policies))
    annotation = draw(st.sampled_from(["FSDP", "'FSDP'", "torch.nn.Module", "'FSDP | None'"]))
    return TRAINING.format(annotation=annotation, before=block(2), policy=policy, after=block(7))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trainings())
def test_promises_hold_on_any_training_code(script: str) -> None:
    """Methods, contexts, types and orders in any mix: compiles, settles, accounts for all."""
    result = rewrite_source(script)
    compile(result.after, "<after>", "exec")
    assert rewrite_source(result.after).after == result.after

    settled = not any(site.state in ("todo", "skipped") for site in result.sites)
    if settled:
        gone = re.compile(
            r"\b(FSDP|StateDictType|ShardedGradScaler|ShardingStrategy)\b|no_sync\(\)"
        )
        assert not gone.search(result.after)
    assert undefined(result.after) <= undefined(script)
