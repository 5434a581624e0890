"""
accelerate's launch configuration (`accelerate config`, `--config_file`).

Settings stand under `fsdp_config`, with or without the prefix `fsdp_`; accelerate 1.6 and later
read `fsdp_version: 2`. Sizes of a 2-D mesh go under `parallelism_config` (1.10 and later).
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_migrate.rewrite.configs.conversion import Conversion
from fsdp_migrate.rewrite.configs.document import Entry, Mapping
from fsdp_migrate.rewrite.configs.settings import Outcome, decide, strategy

RULE = "accelerate-config"
PREFIX = "fsdp_"


def recognises(top: Mapping, _path: str) -> bool:
    return "fsdp_config" in top and ("compute_environment" in top or "distributed_type" in top)


def convert(top: Mapping, conversion: Conversion) -> None:
    entry = top.get("fsdp_config")
    settings = entry.mapping if entry else None
    if entry is None or settings is None or not list(settings):
        return
    reason = _reason_to_leave(top, settings)
    if reason:
        conversion.tell(entry, "skipped", reason)
        return
    for setting in settings:
        name = setting.key.removeprefix(PREFIX)
        if name == "version":
            outcome = Outcome("rewritten", "FSDP2 is version 2", value="2")
        else:
            outcome = _named(setting, decide(name, setting, settings))
        if outcome.state == "rewritten" and strategy(setting.text).startswith("HYBRID"):
            outcome = _hybrid(top, outcome, as_json=conversion.edits.as_json)
        conversion.decide(settings, setting, outcome)
    if conversion.is_open:
        conversion.leave_open()
        return
    conversion.make()
    _complete(top, entry, settings, conversion)


def _reason_to_leave(top: Mapping, settings: Mapping) -> str:
    kind = top.text("distributed_type").upper()
    if kind and kind != "FSDP":
        return f"distributed_type is {kind}: accelerate does not read these settings"
    if settings.text("fsdp_version") == "2" or settings.text("version") == "2":
        return "is FSDP2 already"
    return ""


def _named(setting: Entry, outcome: Outcome) -> Outcome:
    """Give a renamed key the prefix that the setting's own key has."""
    if outcome.key and setting.key.startswith(PREFIX):
        return replace(outcome, key=PREFIX + outcome.key)
    return outcome


def _hybrid(top: Mapping, outcome: Outcome, *, as_json: bool) -> Outcome:
    """HYBRID_SHARD shards inside a machine and replicates across: the sizes must be in the file."""
    if "parallelism_config" in top:
        return replace(outcome, message=outcome.message + "; the mesh is in parallelism_config")
    sizes = _sizes(top)
    if sizes is None or (as_json and sizes[0] > 1):
        message = (
            "HYBRID_SHARD needs a 2-D mesh: give num_machines and num_processes, or "
            "parallelism_config_dp_replicate_size and _dp_shard_size under parallelism_config"
        )
        return Outcome("todo", message)
    machines, shards = sizes
    if machines == 1:
        return replace(outcome, message=outcome.message + "; on one machine nothing is replicated")
    message = (
        f"{outcome.message}, on a mesh of {machines} replicas of {shards} shards, from "
        "num_machines and num_processes: adapt it if the command line overrides these"
    )
    return replace(outcome, state="differs", message=message)


def _sizes(top: Mapping) -> tuple[int, int] | None:
    """(machines, processes on each), None where the file does not say or they do not divide."""
    machines, processes = top.text("num_machines"), top.text("num_processes")
    if not (machines.isdigit() and processes.isdigit() and int(machines)):
        return None
    shards, rest = divmod(int(processes), int(machines))
    return None if rest or not shards else (int(machines), shards)


def _complete(top: Mapping, entry: Entry, settings: Mapping, conversion: Conversion) -> None:
    """Add what FSDP2 needs and FSDP1 did not have, or had by default."""
    edits = conversion.edits
    if "fsdp_version" not in settings and "version" not in settings:
        edits.append(settings, "fsdp_version", "2")
        conversion.tell(entry, "rewritten", "fsdp_version: 2 added; accelerate reads none as 1")
    if "fsdp_state_dict_type" not in settings and "state_dict_type" not in settings:
        edits.append(settings, "fsdp_state_dict_type", "FULL_STATE_DICT")
        message = (
            "fsdp_state_dict_type: FULL_STATE_DICT added: it was the default, in FSDP2 it is not"
        )
        conversion.tell(entry, "rewritten", message)
    hybrid = any(strategy(setting.text).startswith("HYBRID") for setting in settings)
    sizes = _sizes(top)
    if hybrid and "parallelism_config" not in top and sizes and sizes[0] > 1:
        lines = [
            f"parallelism_config_dp_replicate_size: {sizes[0]}",
            f"parallelism_config_dp_shard_size: {sizes[1]}",
        ]
        edits.insert_above(entry, ["parallelism_config:", *("  " + line for line in lines)])
