"""
What becomes of each FSDP1 setting, whatever file names it.

accelerate, axolotl and transformers hand the same settings to the same plugin, each with its own
spelling of the key (`fsdp_use_orig_params`, `use_orig_params`). One table serves all of them.
accelerate's own `to-fsdp2` maps NO_SHARD to "do not reshard", which shards what was replicated,
and HYBRID_SHARD to "reshard", which loses the second mesh dimension: both need a mesh or a
different wrapper, so here they are questions for the dialect, never a boolean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_migrate.rewrite.configs.document import Entry, Mapping
from fsdp_migrate.rewrite.options import State

# The order is accelerate's: a file may give the number, from 1.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STATE_DICT_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
RESHARD = {
    "FULL_SHARD": "true",
    "SHARD_GRAD_OP": "false",
    "HYBRID_SHARD": "true",
    "HYBRID_SHARD_ZERO2": "false",
}
# Settings that mean the same in both versions.
SHARED = {
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_offload",
    "cpu_offload_pin_memory",
    "cpu_ram_efficient_loading",
    "final_state_dict_type",
    "ignored_modules",
    "min_num_params",
    "mixed_precision_policy",
    "offload_params",
    "transformer_layer_cls_to_wrap",
}


@dataclass(frozen=True)
class Outcome:
    """`key` and `value` are what stands there afterwards: None is "as before", "" is "gone"."""

    state: State | None  # None: nothing to tell
    message: str = ""
    key: str | None = None
    value: str | None = None


def known(name: str) -> bool:
    return name in SHARED or name in HANDLERS


def decide(name: str, entry: Entry, settings: Mapping) -> Outcome:
    """The outcome for one setting, `name` being its key without any prefix."""
    if name in SHARED:
        return Outcome(None)
    handler = HANDLERS.get(name)
    if handler is None:
        return Outcome("skipped", f"{entry.key} is not a setting of FSDP1: left as it stands")
    return handler(entry, settings)


def strategy(value: str) -> str:
    """The strategy a file names by name or number, upper case; the text itself if it is neither."""
    name = value.upper().rpartition(".")[2].removeprefix("_")
    number = int(name) if name.isdigit() else 0
    return STRATEGIES[number - 1] if 0 < number <= len(STRATEGIES) else name


def _strategy(entry: Entry, _: Mapping) -> Outcome:
    name = strategy(entry.text)
    if name in ("TRUE", "FALSE"):
        return Outcome(None, key="reshard_after_forward")
    if name == "NO_SHARD":
        return Outcome("todo", NO_SHARD)
    if name not in RESHARD:
        return Outcome("todo", f"{entry.text or 'no value'} is not a sharding strategy of FSDP1")
    return Outcome(
        "rewritten",
        f"{name} is reshard_after_forward: {RESHARD[name]}",
        key="reshard_after_forward",
        value=RESHARD[name],
    )


NO_SHARD = (
    "NO_SHARD keeps a whole copy on every rank; FSDP2 has no setting for that, and "
    "reshard_after_forward: false would shard. Use DDP, or FULL_SHARD if sharding is wanted"
)


def _forward_prefetch(entry: Entry, _: Mapping) -> Outcome:
    if not entry.is_true:
        return Outcome("rewritten", "off is FSDP2's only behaviour", key="")
    return Outcome("differs", "FSDP2 prefetches on its own; there is no explicit switch", key="")


def _backward_prefetch(entry: Entry, _: Mapping) -> Outcome:
    if entry.text.upper() in ("BACKWARD_PRE", "1"):
        return Outcome("rewritten", "BACKWARD_PRE is what FSDP2 always does", key="")
    return Outcome(
        "differs",
        f"FSDP2 always prefetches as BACKWARD_PRE does, not {entry.text or 'none'}",
        key="",
    )


def _orig_params(entry: Entry, _: Mapping) -> Outcome:
    if entry.is_true:
        return Outcome("rewritten", "FSDP2 always uses the original parameters", key="")
    message = (
        "FSDP2 always uses the original parameters: parameter groups by name now work, and "
        "optimizer states saved with flat parameters need converting"
    )
    return Outcome("differs", message, key="")


def _sync_states(entry: Entry, settings: Mapping) -> Outcome:
    loads_on_rank_0 = any(
        other.key.removeprefix("fsdp_") == "cpu_ram_efficient_loading" and other.is_true
        for other in settings
    )
    if not entry.is_true or loads_on_rank_0:
        return Outcome("rewritten", "loading on rank 0 broadcasts by itself in FSDP2", key="")
    message = (
        "FSDP2 does not broadcast rank 0's weights without cpu_ram_efficient_loading: "
        "every rank must start from the same ones"
    )
    return Outcome("differs", message, key="")


def _state_dict_type(entry: Entry, _: Mapping) -> Outcome:
    name = entry.text.upper()
    name = STATE_DICT_TYPES[int(name) - 1] if name in ("1", "2", "3") else name
    if name != "LOCAL_STATE_DICT":
        return Outcome(None)
    message = "FSDP2 has no local state dicts; checkpoints saved so far need convert-ckpt"
    return Outcome("differs", message, value="SHARDED_STATE_DICT")


def _wrap_policy(entry: Entry, _: Mapping) -> Outcome:
    if entry.text.upper() != "SIZE_BASED_WRAP":
        return Outcome(None)
    message = "size based wrapping tests each module alone in FSDP2: other units than FSDP1's"
    return Outcome("differs", message)


def _all_gathers(_entry: Entry, _: Mapping) -> Outcome:
    return Outcome("rewritten", "FSDP2 has no rate limiter to set", key="")


HANDLERS: dict[str, Callable[[Entry, Mapping], Outcome]] = {
    "sharding_strategy": _strategy,
    "reshard_after_forward": _strategy,
    "forward_prefetch": _forward_prefetch,
    "backward_prefetch": _backward_prefetch,
    "backward_prefetch_policy": _backward_prefetch,
    "use_orig_params": _orig_params,
    "sync_module_states": _sync_states,
    "limit_all_gathers": _all_gathers,
    "state_dict_type": _state_dict_type,
    "auto_wrap_policy": _wrap_policy,
}
