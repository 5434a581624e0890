"""
The names of FSDP1: which qualified names mean it, and what each is called here.

FSDP1's classes were importable from several homes over the years (`torch.distributed.fsdp`,
`.api`, `.fully_sharded_data_parallel`, ...). All homes of one class share one short name. What
merely looks alike (fairscale, torch_xla, local classes) never resolves to any of these.
"""

from __future__ import annotations

from dataclasses import dataclass

FSDP = "FullyShardedDataParallel"
HOME = "torch.distributed.fsdp"

CLASSES = frozenset(
    {
        FSDP,
        "MixedPrecision",
        "CPUOffload",
        "ShardingStrategy",
        "BackwardPrefetch",
        "StateDictType",
        "StateDictConfig",
        "FullStateDictConfig",
        "ShardedStateDictConfig",
        "LocalStateDictConfig",
        "OptimStateDictConfig",
        "FullOptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "LocalOptimStateDictConfig",
        "StateDictSettings",
        "OptimStateKeyType",
        "FlatParameter",
        "FlatParamHandle",
        "ShardedGradScaler",
    }
)
# Still there, and useful, beside FSDP2: an import of them is not by itself a use of FSDP1.
POLICIES = frozenset(
    {
        "transformer_auto_wrap_policy",
        "size_based_auto_wrap_policy",
        "lambda_auto_wrap_policy",
        "always_wrap_policy",
        "_module_wrap_policy",
        "_or_policy",
        "ModuleWrapPolicy",
        "CustomPolicy",
        "enable_wrap",
        "wrap",
        "_recursive_wrap",
    }
)
FSDP2_NAMES = frozenset(
    {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "CPUOffloadPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "register_fsdp_forward_method",
        "share_comm_ctx",
        "DataParallelMeshDims",
    }
)
OLD_CHECKPOINT = {
    "torch.distributed.checkpoint.save_state_dict": "dcp.save_state_dict",
    "torch.distributed.checkpoint.load_state_dict": "dcp.load_state_dict",
    "torch.distributed.checkpoint.state_dict_saver.save_state_dict": "dcp.save_state_dict",
    "torch.distributed.checkpoint.state_dict_loader.load_state_dict": "dcp.load_state_dict",
    "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict": (
        "dcp.load_sharded_optimizer_state_dict"
    ),
}
FSDP2_HOME = dict.fromkeys(FSDP2_NAMES, HOME)
BEFORE_PUBLIC = "torch.distributed._composable.fsdp"  # home of fully_shard until torch 2.6


@dataclass(frozen=True, slots=True)
class Api:
    """A class or function of FSDP1, and the member of it that is meant, if any."""

    name: str
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.name}.{self.member}" if self.member else self.name


def find(qualified: str) -> Api | None:
    """The FSDP1 name that `qualified` stands for; None for everything else."""
    if qualified in OLD_CHECKPOINT:
        return Api(OLD_CHECKPOINT[qualified])
    if qualified == "torch.distributed._composable.fully_shard.fully_shard":
        return Api("composable.fully_shard")
    if not qualified.startswith(f"{HOME}."):
        return None
    parts = qualified.removeprefix(f"{HOME}.").split(".")
    for position, part in enumerate(parts[:3]):
        rest = parts[position + 1 :]
        if part in FSDP2_NAMES or part == "_fully_shard":
            return None
        if part in CLASSES or (part in POLICIES and (part != "wrap" or position)):
            if len(rest) > 1:
                return None  # a chain that goes deeper; its first two parts are the use
            return Api(part, rest[0] if rest else None)
    private = len(parts) > 1 and parts[0].startswith("_")
    return Api(f"private {parts[0]}", ".".join(parts[1:])) if private and len(parts) == 2 else None


def fsdp2_home(name: str, target: tuple[int, int]) -> str:
    return BEFORE_PUBLIC if target < (2, 6) else FSDP2_HOME[name]


_RULES = {
    "MixedPrecision": "mixed-precision",
    "CPUOffload": "cpu-offload",
    "ShardingStrategy": "strategy-value",
    "ShardedGradScaler": "grad-scaler",
    "enable_wrap": "wrap-factory",
    "wrap": "wrap-factory",
    f"{FSDP}.state_dict_type": "state-dict-context",
    f"{FSDP}.set_state_dict_type": "sticky-state-dict-type",
    f"{FSDP}.summon_full_params": "summon-full-params",
    f"{FSDP}.fsdp_modules": "fsdp-modules",
    FSDP: "model-type",
}


def rule_of(api: Api) -> str:
    """The rule whose business a use is, by its name alone."""
    if "optim_state_dict" in str(api.member):
        return "optimizer-state"
    if api.name.startswith("dcp."):
        return "old-checkpoint"
    return _RULES.get(str(api), _RULES.get(api.name, "leftovers"))
