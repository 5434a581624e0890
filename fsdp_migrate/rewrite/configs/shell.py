"""
FSDP1 asked for on a command line: `--fsdp "full_shard auto_wrap"`, `accelerate launch --fsdp_...`,
`FSDP_...=` in the environment.

Reported, never edited: a comment inside a continued command would cut it in two, and quoting rules
differ between the shells that may run the file. The message says what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fsdp_migrate.rewrite.configs.settings import RESHARD, strategy
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.report import Site

RULE = "launch-arguments"
SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub", ".job")
DROPPED = (
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "limit_all_gathers",
    "sync_module_states",
    "use_orig_params",
)
OPTION = re.compile(
    r"""(?<![\w-])--(use_fsdp|fsdp(?:_\w+)?)(?![\w-])(?:[ =]+("[^"]*"|'[^']*'|[^\s\\-]\S*))?"""
)
VARIABLE = re.compile(r"""(?<![\w$])(?:ACCELERATE_USE_)?FSDP_(\w+)=("[^"]*"|'[^']*'|\S*)""")


def sites(text: str, path: str) -> list[Site]:
    """Every FSDP1 argument in a script, each with what takes its place."""
    rows = [row for row in enumerate(text.splitlines(), 1) if not row[1].lstrip().startswith("#")]
    version_2 = any(re.search(r"fsdp_version[ =]+[\"']?2|FSDP_VERSION=[\"']?2", r) for _, r in rows)
    found = [(line, *what) for line, row in rows for what in _found(row)]
    if version_2:
        reason = "fsdp_version 2 is chosen in this file"
        return [Site(path, line, api, "skipped", RULE, reason) for line, api, _, _ in found]
    return [Site(path, line, api, *_advice(name, value)) for line, api, name, value in found]


def _found(row: str) -> Iterator[tuple[str, str, str]]:
    for match in OPTION.finditer(row):
        yield f"--{match[1]}", match[1], (match[2] or "").strip("\"'")
    for match in VARIABLE.finditer(row):
        yield f"FSDP_{match[1]}", f"fsdp_{match[1].lower()}", match[2].strip("\"'")


def _advice(name: str, value: str) -> tuple[State, str, str]:
    if name == "fsdp":
        return "todo", RULE, f"say --fsdp true and, in the --fsdp_config file, {_words(value)}"
    if name == "fsdp_config":
        return (
            "skipped",
            RULE,
            f"{value or 'the file'} is rewritten where it stands, if it was given",
        )
    if name == "use_fsdp":
        return "todo", RULE, "add --fsdp_version 2 to this command"
    if name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        reshard = RESHARD.get(strategy(value))
        if reshard and not strategy(value).startswith("HYBRID"):
            return "todo", RULE, f"say --fsdp_version 2 --fsdp_reshard_after_forward {reshard}"
        return "todo", RULE, f"{value}: FSDP2 has no such setting; it takes a mesh, or DDP"
    if name.removeprefix("fsdp_") in DROPPED:
        return "todo", RULE, "take it out: FSDP2 has no such setting"
    if value == "LOCAL_STATE_DICT":
        return "todo", RULE, "say SHARDED_STATE_DICT: FSDP2 has no local state dicts"
    return "skipped", RULE, "means the same in FSDP2"


def _words(value: str) -> str:
    settings = ["version: 2"]
    for word in value.split():
        name = strategy(word)
        if name in ("FULL_SHARD", "SHARD_GRAD_OP"):
            settings.append(f"reshard_after_forward: {RESHARD[name]}")
        elif name == "OFFLOAD":
            settings.append("cpu_offload: true")
        elif name != "AUTO_WRAP":
            settings.append(f"nothing for {word}: it takes a mesh, or DDP")
    if "auto_wrap" not in value:
        settings.append("auto_wrap_policy: NO_WRAP")
    return ", ".join(settings)
