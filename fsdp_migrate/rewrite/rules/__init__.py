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
from fsdp_migrate.rewrite.rules.clip_grad_norm import ClipGradNorm
from fsdp_migrate.rewrite.rules.copied_model import CopiedModel
from fsdp_migrate.rewrite.rules.cpu_offload import CpuOffloadArgument, CpuOffloadObject
from fsdp_migrate.rewrite.rules.dual_path import DualPath
from fsdp_migrate.rewrite.rules.eval_forward import EvalForward
from fsdp_migrate.rewrite.rules.forward_method import ForwardMethod
from fsdp_migrate.rewrite.rules.fsdp_modules import FsdpModules
from fsdp_migrate.rewrite.rules.global_sizes import GlobalSizes
from fsdp_migrate.rewrite.rules.grad_scaler import ShardedScaler
from fsdp_migrate.rewrite.rules.internals import Internals
from fsdp_migrate.rewrite.rules.leftovers import Leftovers
from fsdp_migrate.rewrite.rules.local_state_dict import LocalStateDict
from fsdp_migrate.rewrite.rules.mixed_precision import MixedPrecisionObject
from fsdp_migrate.rewrite.rules.no_sync import NoSync
from fsdp_migrate.rewrite.rules.old_checkpoint import OldCheckpoint
from fsdp_migrate.rewrite.rules.optimizer_order import OptimizerOrder
from fsdp_migrate.rewrite.rules.optimizer_state import OptimizerState
from fsdp_migrate.rewrite.rules.state_dict_call import StateDictCall
from fsdp_migrate.rewrite.rules.state_dict_context import StateDictContext
from fsdp_migrate.rewrite.rules.sticky_state_dict_type import StickyStateDictType
from fsdp_migrate.rewrite.rules.strategy_value import StrategyValue
from fsdp_migrate.rewrite.rules.summon_full_params import SummonFullParams
from fsdp_migrate.rewrite.rules.types import ModelType
from fsdp_migrate.rewrite.rules.unwrapping import Unwrapping
from fsdp_migrate.rewrite.rules.wrap_call import WrapCall
from fsdp_migrate.rewrite.rules.wrap_factory import WrapFactory

RULES: tuple[type[Rule], ...] = (
    DualPath,
    WrapCall,
    WrapFactory,
    ActivationCheckpointing,
    OptimizerOrder,
    CopiedModel,
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
    LocalStateDict,
    OldCheckpoint,
    StateDictContext,
    StickyStateDictType,
    OptimizerState,
    StateDictCall,
    SummonFullParams,
    ForwardMethod,
    EvalForward,
    GlobalSizes,
    ClipGradNorm,
    NoSync,
    ShardedScaler,
    ModelType,
    Unwrapping,
    FsdpModules,
    Internals,
    StrategyValue,
    Leftovers,
)
WRAPPING = 3  # the first rules decide whether the run's models move to FSDP2 at all
ARGUMENT_RULES: tuple[type[ArgumentRule], ...] = tuple(
    rule for rule in RULES if issubclass(rule, ArgumentRule)
)
