"""
axolotl's training configuration.

FSDP2 is chosen by `fsdp_version: 2` at the top; settings stand under `fsdp_config` without the
prefix `fsdp_`. The older list `fsdp: [full_shard, auto_wrap]` says the same as three settings and
goes into them. A 2-D mesh is `dp_replicate_size` and `dp_shard_size` at the top.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_migrate.rewrite.configs.conversion import Conversion
from fsdp_migrate.rewrite.configs.document import Entry, Mapping
from fsdp_migrate.rewrite.configs.settings import NO_SHARD, RESHARD, Outcome, decide, strategy

RULE = "axolotl-config"
PREFIX = "fsdp_"
HYBRID = (
    "HYBRID_SHARD needs a 2-D mesh: set dp_replicate_size (machines) and dp_shard_size (processes "
    "on each) at the top of this file"
)


def recognises(top: Mapping, _path: str) -> bool:
    has_settings = any(key in top for key in ("fsdp", "fsdp_config"))
    return "base_model" in top and has_settings and not top.in_flow_style


def convert(top: Mapping, conversion: Conversion) -> None:
    entry = top.get("fsdp_config")
    settings = entry.mapping if entry else None
    options = top.get("fsdp")
    first = options or entry
    if first is None or not ((settings and list(settings)) or (options and options.items)):
        return
    if top.text("fsdp_version") == "2" or (settings and settings.text("fsdp_version") == "2"):
        conversion.tell(first, "skipped", "is FSDP2 already")
        return
    added = _from_options(top, options, settings, conversion) if options else {}
    for setting in settings or ():
        conversion.decide(settings, setting, _setting(top, setting, settings))  # type: ignore[arg-type]
    final = top.get("fsdp_final_state_dict_type")
    if final is not None and final.text:
        added["final_state_dict_type"] = final.text
        conversion.decide(top, final, Outcome("rewritten", "moved into fsdp_config", key=""))
    _version(top, first, conversion)
    if conversion.is_open:
        conversion.leave_open()
        return
    conversion.make()
    _add(added, first, settings, conversion)


def _setting(top: Mapping, setting: Entry, settings: Mapping) -> Outcome:
    name = setting.key.removeprefix(PREFIX)
    if name == "version":
        return Outcome("rewritten", "the version stands at the top of the file", key="")
    outcome = decide(name, setting, settings)
    if strategy(setting.text).startswith("HYBRID") and "dp_replicate_size" not in top:
        return Outcome("todo", HYBRID)
    if outcome.state == "skipped":
        return Outcome("todo", f"{setting.key} is not a setting axolotl reads under FSDP2")
    if outcome.key is None and name != setting.key:
        state = outcome.state or "rewritten"
        return replace(outcome, state=state, key=name, message=outcome.message or f"is {name} now")
    return outcome


def _from_options(
    top: Mapping, options: Entry, settings: Mapping | None, conversion: Conversion
) -> dict[str, str]:
    """What the words of `fsdp:` mean as settings. Settings that the file has already stand."""
    added = {}
    outcome = Outcome("rewritten", "its words are settings of fsdp_config now", key="")
    for word in options.items:
        name = strategy(word)
        if name == "AUTO_WRAP":
            added["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        elif name == "OFFLOAD":
            added["offload_params"] = "true"
        elif name == "NO_SHARD":
            outcome = Outcome("todo", NO_SHARD)
        elif name.startswith("HYBRID") and "dp_replicate_size" not in top:
            outcome = Outcome("todo", HYBRID)
        elif name in RESHARD:
            added["reshard_after_forward"] = RESHARD[name]
        else:
            outcome = Outcome("todo", f"{word} is not an option of fsdp")
    conversion.decide(top, options, outcome)
    present = {entry.key.removeprefix(PREFIX) for entry in settings or ()}
    if "sharding_strategy" in present:
        added.pop("reshard_after_forward", None)
    return {key: value for key, value in added.items() if key not in present}


def _version(top: Mapping, first: Entry, conversion: Conversion) -> None:
    version = top.get("fsdp_version")
    if version is not None:
        conversion.decide(top, version, Outcome("rewritten", "FSDP2 is version 2", value="2"))
    elif not conversion.is_open:
        conversion.edits.insert_above(first, ["fsdp_version: 2"])
        conversion.tell(first, "rewritten", "fsdp_version: 2 added; axolotl reads none as 1")


def _add(
    added: dict[str, str], first: Entry, settings: Mapping | None, conversion: Conversion
) -> None:
    if settings and list(settings):
        for key, value in added.items():
            conversion.edits.append(settings, key, value)
    elif added:
        lines = [f"  {key}: {value}" for key, value in added.items()]
        conversion.edits.insert_above(first, ["fsdp_config:", *lines])
