"""
transformers' training arguments in a file, and the file that `--fsdp_config` names.

In both versions 4 and 5 `fsdp: true` turns FSDP on and `version: 2` among the settings makes it
FSDP2; the words of the older `fsdp: "full_shard auto_wrap"` become settings. Sharding on a 2-D
mesh is no setting here: it takes a `ParallelismConfig` in code.
"""

from __future__ import annotations

from dataclasses import replace

from fsdp_migrate.rewrite.configs.conversion import Conversion
from fsdp_migrate.rewrite.configs.document import Entry, Mapping
from fsdp_migrate.rewrite.configs.settings import (
    NO_SHARD,
    RESHARD,
    Outcome,
    decide,
    known,
    strategy,
)

RULE = "transformers-config"
PREFIX = "fsdp_"
HYBRID = "HYBRID_SHARD needs a 2-D mesh: give TrainingArguments a ParallelismConfig in code"
# Settings that only a file of FSDP settings would have at its top.
SIGNS = ("transformer_layer_cls_to_wrap", "backward_prefetch", "limit_all_gathers")
OTHER = ("version", "xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2")


def recognises(top: Mapping, _path: str) -> bool:
    return _is_arguments(top) or _is_settings(top)


def _is_arguments(top: Mapping) -> bool:
    arguments = ("output_dir", "per_device_train_batch_size", "model_name_or_path", "learning_rate")
    return any(key in top for key in arguments) and ("fsdp" in top or "fsdp_config" in top)


def _is_settings(top: Mapping) -> bool:
    names = [entry.key.removeprefix(PREFIX) for entry in top]
    signs = any(name in SIGNS for name in names) or any(e.key.startswith(PREFIX) for e in top)
    return signs and all(known(name) or name in OTHER for name in names)


def convert(top: Mapping, conversion: Conversion) -> None:
    if not _is_arguments(top):
        _convert_settings(top, next(iter(top)), {}, conversion)
        return
    options, entry = top.get("fsdp"), top.get("fsdp_config")
    if options is None or not options.items or options.text.lower() in ("false", "no"):
        return  # without `fsdp` the settings are not read
    settings = entry.mapping if entry else None
    if settings is None and entry is not None and entry.text:
        _file_named(top, options, entry, conversion)
        return
    if settings is None or not list(settings):
        message = "say `fsdp: true` and `fsdp_config: {version: 2, ...}` instead of these words"
        outcome = _words(options)[0]
        conversion.decide(
            top, options, outcome if outcome.state == "todo" else Outcome("todo", message)
        )
        conversion.leave_open()
        return
    outcome, added = _words(options)
    conversion.decide(top, options, outcome)
    for name in ("transformer_layer_cls_to_wrap", "min_num_params"):  # arguments of their own once
        old = top.get(PREFIX + name)
        if old is not None:
            added[name] = old.text
            conversion.decide(top, old, Outcome("rewritten", "moved into fsdp_config", key=""))
    _convert_settings(settings, options, added, conversion)


def _convert_settings(
    settings: Mapping, entry: Entry, added: dict[str, str], conversion: Conversion
) -> None:
    version = settings.get("version") or settings.get("fsdp_version")
    xla = settings.get("xla")
    if (version and version.text == "2") or (xla and xla.is_true):
        conversion.decided.clear()
        what = "is FSDP2 already" if version and version.text == "2" else "is FSDP of torch_xla"
        conversion.tell(entry, "skipped", what)
        return
    for setting in settings:
        conversion.decide(settings, setting, _setting(setting, settings))
    if conversion.is_open:
        conversion.leave_open()
        return
    conversion.make()
    present = {setting.key.removeprefix(PREFIX) for setting in settings}
    sized = (settings.text("min_num_params") or settings.text("fsdp_min_num_params")) not in (
        "",
        "0",
    )
    if sized and "transformer_layer_cls_to_wrap" not in present | set(added):
        added = {"auto_wrap_policy": "SIZE_BASED_WRAP", **added}  # was chosen by the number alone
    for key, value in {**added, **({} if version else {"version": "2"})}.items():
        if key not in present:
            conversion.edits.append(settings, key, value)
    if not version:
        conversion.tell(entry, "rewritten", "version: 2 added to the FSDP settings")


def _setting(setting: Entry, settings: Mapping) -> Outcome:
    name = setting.key.removeprefix(PREFIX)
    if name == "version":
        return Outcome("rewritten", "FSDP2 is version 2", value="2")
    if name in OTHER:
        return Outcome(None)
    if strategy(setting.text).startswith("HYBRID"):
        return Outcome("todo", HYBRID)
    outcome = decide(name, setting, settings)
    if outcome.key and setting.key.startswith(PREFIX):
        return replace(outcome, key=PREFIX + outcome.key)
    return outcome


def _words(options: Entry) -> tuple[Outcome, dict[str, str]]:
    """What the words of `fsdp` mean as settings. Without auto_wrap FSDP1 wrapped the root only."""
    if options.is_true:
        return Outcome(None), {}
    added = {"auto_wrap_policy": "NO_WRAP"}
    outcome = Outcome("rewritten", "its words are settings of fsdp_config now", value="true")
    for word in options.items:
        name = strategy(word)
        if name == "AUTO_WRAP":
            added.pop("auto_wrap_policy")
        elif name == "OFFLOAD":
            added["cpu_offload"] = "true"
        elif name == "NO_SHARD":
            outcome = Outcome("todo", NO_SHARD)
        elif name.startswith("HYBRID"):
            outcome = Outcome("todo", HYBRID)
        elif name in RESHARD:
            added["reshard_after_forward"] = RESHARD[name]
        else:
            outcome = Outcome("todo", f"{word} is not an option of fsdp")
    return outcome, added


def _file_named(top: Mapping, options: Entry, entry: Entry, conversion: Conversion) -> None:
    outcome, added = _words(options)
    if outcome.state == "rewritten":
        settings = ", ".join(f"{key}: {value}" for key, value in added.items())
        message = f"set this to true, and add {settings or 'version: 2'} to {entry.text}"
        outcome = Outcome("todo", message)
    conversion.decide(top, options, outcome)
    conversion.leave_open()
