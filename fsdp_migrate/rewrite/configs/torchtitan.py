"""
torchtitan's job file, as it was while `data_parallel_type` chose between FSDP1 and DDP.

Today's file has degrees instead: `data_parallel_shard_degree` (-1: all ranks that are left),
`data_parallel_replicate_degree`, and `fsdp_reshard_after_forward` (default, always, never).
TOML settings are one line each, so lines are edited; `tomlkit` reads what they mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fsdp_migrate.errors import Corrupt
from fsdp_migrate.rewrite.configs.edits import MARKER
from fsdp_migrate.rewrite.configs.settings import strategy
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.report import Site

RULE = "torchtitan-config"
TABLES = ("training", "parallelism", "experimental")
STRATEGY = ("sharding_strategy", "fsdp_sharding_strategy", "data_parallel_sharding_strategy")
DEAD = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
RESHARD = {
    "FULL_SHARD": "default",
    "SHARD_GRAD_OP": "never",
    "HYBRID_SHARD": "default",
    "HYBRID_SHARD_ZERO2": "never",
}
HEADER = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")
SETTING = re.compile(
    r"""(\s*)["']?([\w-]+)["']?\s*=\s*(?:"[^"]*"|'[^']*'|[^#\r\n]*?)(\s*(?:#.*)?)$"""
)


@dataclass(frozen=True)
class Setting:
    """One FSDP1 setting and what replaces it: `lines` without the indent, None to leave it."""

    row: int
    key: str
    value: str
    state: State = "rewritten"
    message: str = ""
    lines: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Table:
    """The rows of one TOML table that set something, by key."""

    rows: dict[str, int] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    def degree(self, key: str) -> int:
        """A degree the file gives, 0 where it gives none or leaves it open (-1)."""
        value = self.values.get(key, "")
        return int(value) if value.isdigit() else 0


def rewrite(text: str, path: str) -> tuple[str, list[Site]] | None:
    """The file's new text and sites, None if it is not torchtitan's. Raises Corrupt."""
    try:
        document = tomlkit.parse(text).unwrap()
    except TOMLKitError as error:
        raise Corrupt(f"{path}: is not TOML: {error}") from None
    if not any(table in document for table in ("job", "metrics")) or "model" not in document:
        return None
    lines = text.splitlines(keepends=True)
    found = [
        setting
        for name in TABLES
        if isinstance(document.get(name), dict)
        for setting in _decide(_table(lines, name, document[name]))
    ]
    if any(setting.state == "todo" for setting in found):
        found = [_waiting(setting) for setting in found]
    for setting in sorted(found, key=lambda s: -s.row):
        lines[setting.row : setting.row + 1] = _new_lines(lines, setting)
    sites = [Site(path, s.row + 1, s.key, s.state, RULE, s.message) for s in found]
    return "".join(lines), sites


def _table(lines: list[str], name: str, values: dict[str, object]) -> Table:
    table, inside = Table(), False
    for row, line in enumerate(lines):
        header = HEADER.match(line)
        if header:
            inside = header[1] == name
        setting = SETTING.match(line.rstrip("\r\n"))
        if inside and setting and setting[2] in values:
            table.rows[setting[2]] = row
            table.values[setting[2]] = str(values[setting[2]])
    return table


def _decide(table: Table) -> list[Setting]:
    kind = table.values.get("data_parallel_type", "fsdp").lower()
    settings = []
    for key, row in table.rows.items():
        setting = Setting(row, key, table.values[key])
        if key == "data_parallel_degree":
            settings.append(_degree(setting, kind, table))
        elif key == "data_parallel_type":
            settings.append(_type(setting, kind, table))
        elif key in STRATEGY:
            settings.append(_strategy(setting, table))
        elif key.removeprefix("fsdp_") in DEAD:
            settings.append(replace(setting, message="FSDP2 has no such setting"))
    return settings


def _degree(setting: Setting, kind: str, table: Table) -> Setting:
    no_shard = any(strategy(table.values.get(key, "")) == "NO_SHARD" for key in STRATEGY)
    if kind == "ddp" or no_shard:
        if not setting.value.isdigit():
            message = "replicas need a number in data_parallel_replicate_degree; -1 is not one"
            return replace(setting, state="todo", message=message, lines=None)
        lines = (
            f"data_parallel_replicate_degree = {setting.value}",
            "data_parallel_shard_degree = 1",
        )
        return replace(setting, message="replicas without shards", lines=lines)
    return replace(
        setting,
        message="is data_parallel_shard_degree",
        lines=(f"data_parallel_shard_degree = {setting.value}",),
    )


def _type(setting: Setting, kind: str, table: Table) -> Setting:
    if kind == "hsdp" and table.degree("data_parallel_replicate_degree") < 2:
        return replace(setting, state="todo", message=HYBRID, lines=None)
    if kind not in ("fsdp", "ddp", "hsdp"):
        return replace(setting, state="todo", message=f"{kind} is not known", lines=None)
    return replace(setting, message="the degrees say it")


HYBRID = "hybrid sharding needs the number of replicas in data_parallel_replicate_degree"


def _strategy(setting: Setting, table: Table) -> Setting:
    name = strategy(setting.value)
    if name.startswith("HYBRID") and table.degree("data_parallel_replicate_degree") < 2:
        return replace(setting, state="todo", message=HYBRID, lines=None)
    if name == "NO_SHARD":
        if "data_parallel_degree" in table.rows:
            return replace(setting, message="the degrees say it")
        message = "NO_SHARD is data_parallel_shard_degree = 1 and all ranks as replicas: how many?"
        return replace(setting, state="todo", message=message, lines=None)
    if name not in RESHARD:
        message = f"{setting.value} is not a sharding strategy of FSDP1"
        return replace(setting, state="todo", message=message, lines=None)
    line = f'fsdp_reshard_after_forward = "{RESHARD[name]}"'
    return replace(setting, message=f"{name} is {line}", lines=(line,))


def _waiting(setting: Setting) -> Setting:
    if setting.state == "todo":
        return setting
    message = "left until the open question in this file is answered"
    return replace(setting, state="skipped", message=message, lines=None)


def _new_lines(lines: list[str], setting: Setting) -> list[str]:
    """The rows that replace the setting's row, in its indent, with its comment and line end."""
    row = lines[setting.row]
    body = row.rstrip("\r\n")
    end = row[len(body) :] or "\n"
    match = SETTING.match(body)
    indent, comment = (match[1], match[3]) if match else ("", "")
    if setting.state == "todo":
        marker = f"{indent}# {MARKER} {RULE} {setting.message}"
        standing = setting.row > 0 and lines[setting.row - 1].rstrip("\r\n") == marker
        return [row] if standing else [marker + end, row]
    if setting.lines is None:
        return [row]
    new = [indent + line for line in setting.lines]
    return [line + (comment if i == 0 else "") + end for i, line in enumerate(new)]
