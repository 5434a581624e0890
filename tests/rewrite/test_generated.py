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


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
