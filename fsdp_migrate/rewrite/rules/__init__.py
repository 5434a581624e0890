"""Every rule, in the order it runs. Adding a rule is one file here and one line below."""

from __future__ import annotations

from fsdp_migrate.rewrite.rule import Rule
from fsdp_migrate.rewrite.rules.activation_checkpointing import ActivationCheckpointing
from fsdp_migrate.rewrite.rules.argument_device import DeviceArgument
from fsdp_migrate.rewrite.rules.argument_dropped import DroppedArgument
from fsdp_migrate.rewrite.rules.argument_ignored import IgnoredArgument
from fsdp_migrate.rewrite.rules.argument_init import InitArgument
from fsdp_migrate.rewrite.rules.argument_kwargs import KeywordDict
from fsdp_migrate.rewrite.rules.argument_mesh import MeshArgument
from fsdp_migrate.rewrite.rules.argument_mixed_precision import MixedPrecisionArgument
from fsdp_migrate.rewrite.rules.argument_policy import AutoWrapPolicy
from fsdp_migrate.rewrite.rules.argument_prefetch import ForwardPrefetchArgument
from fsdp_migrate.rewrite.rules.argument_sharding import ShardingStrategyArgument
from fsdp_migrate.rewrite.rules.arguments import ArgumentRule
from fsdp_migrate.rewrite.rules.cpu_offload import CpuOffloadArgument, CpuOffloadObject
from fsdp_migrate.rewrite.rules.mixed_precision import MixedPrecisionObject
from fsdp_migrate.rewrite.rules.state_dict_call import StateDictCall
from fsdp_migrate.rewrite.rules.state_dict_context import StateDictContext
from fsdp_migrate.rewrite.rules.wrap_call import WrapCall

RULES: tuple[type[Rule], ...] = (
    WrapCall,
    ActivationCheckpointing,
    AutoWrapPolicy,
    MixedPrecisionArgument,
    CpuOffloadArgument,
    DeviceArgument,
    IgnoredArgument,
    InitArgument,
    KeywordDict,
    MeshArgument,
    ForwardPrefetchArgument,
    ShardingStrategyArgument,
    DroppedArgument,
    MixedPrecisionObject,
    CpuOffloadObject,
    StateDictContext,
    StateDictCall,
)
ARGUMENT_RULES: tuple[type[ArgumentRule], ...] = tuple(
    rule for rule in RULES if issubclass(rule, ArgumentRule)
)
