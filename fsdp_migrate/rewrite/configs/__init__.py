"""
FSDP settings outside of code: one module a dialect, tried in order, the catch-all last.

`rewrite` handles a configuration file or a shell script. `beside` adds to a Python file's result
what the file asks of Lightning, accelerate and transformers, which the rules for code leave alone.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import PurePath
from types import ModuleType

from fsdp_migrate.errors import SourceError
from fsdp_migrate.rewrite.configs import (
    accelerate,
    arguments,
    axolotl,
    lightning,
    notebook,
    shell,
    torchtitan,
    transformers,
    unknown,
)
from fsdp_migrate.rewrite.configs.conversion import Conversion, Dialect
from fsdp_migrate.rewrite.configs.document import MENTION, parse
from fsdp_migrate.rewrite.configs.edits import MARKER, Edits
from fsdp_migrate.rewrite.configs.imports import imported_names
from fsdp_migrate.rewrite.options import Options
from fsdp_migrate.rewrite.report import Result, Site
from fsdp_migrate.rewrite.skips import Skips

DIALECTS: tuple[Dialect, ...] = (accelerate, axolotl, transformers, unknown)
RULES: dict[str, ModuleType] = {
    module.RULE: module
    for module in (
        accelerate,
        axolotl,
        transformers,
        torchtitan,
        unknown,
        shell,
        lightning,
        notebook,
    )
}
SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".ipynb", *shell.SUFFIXES)


def rewrite(path: str, text: str, options: Options) -> Result:
    """One configuration file or shell script. A file that cannot be read right is an error."""
    if not MENTION.search(text) or Skips(text).whole_file:
        return Result(path, text, text)
    try:
        after, sites = _rewrite(path, text, options)
    except SourceError as error:
        return Result(path, text, text, error=str(error))
    return Result(path, text, after, _in_order(sites))


def beside(result: Result, options: Options) -> Result:
    """The result of a Python file with what it says to other libraries, reported and marked."""
    found = report_python(result.path, result.before, options)
    if not found:
        return result
    sites = _in_order([*result.sites, *found])
    return replace(result, after=mark_python(result.after, options), sites=sites)


def _in_order(sites: list[Site]) -> tuple[Site, ...]:
    return tuple(sorted(sites, key=lambda site: site.line))


def _rewrite(path: str, text: str, options: Options) -> tuple[str, list[Site]]:
    suffix = PurePath(path).suffix
    if suffix in shell.SUFFIXES:
        return text, shell.sites(text, path) if options.wants(shell.RULE) else []
    if suffix == ".ipynb":
        return text, notebook.sites(text, path) if options.wants(notebook.RULE) else []
    if suffix == ".toml":
        wanted = options.wants(torchtitan.RULE)
        return (torchtitan.rewrite(text, path) if wanted else None) or (text, [])
    top = parse(text, path)
    if top is None or not list(top):
        return text, []
    dialect = next(dialect for dialect in DIALECTS if dialect.recognises(top, path))
    if not options.wants(dialect.RULE):
        return text, []
    conversion = Conversion(path, dialect.RULE, Edits(text, as_json=suffix == ".json"))
    dialect.convert(top, conversion)
    return conversion.edits.apply(), conversion.sites


def report_python(path: str, text: str, options: Options) -> list[Site]:
    """What a Python file asks of the libraries that wrap FSDP1. The text must parse."""
    skips = Skips(text)
    if not MENTION.search(text) or skips.whole_file:
        return []
    tree = ast.parse(text)
    names = imported_names(tree)
    found = [*lightning.sites(tree, names, path), *arguments.sites(tree, names, path)]
    return [
        site
        for site in found
        if options.wants(site.rule) and not skips.covers(site.line, site.line, site.rule)
    ]


def mark_python(text: str, options: Options) -> str:
    """The text with a marker and a sketch above each statement that makes a Lightning strategy."""
    sites = [site for site in report_python("", text, options) if site.rule == lightning.RULE]
    lines = text.splitlines(keepends=True)
    statements = _statements(ast.parse(text), {site.line for site in sites})
    for statement in sorted(statements, key=lambda s: -s.lineno):
        row = lines[statement.lineno - 1]
        indent = row[: len(row) - len(row.lstrip())]
        end = row[len(row.rstrip("\r\n")) :] or "\n"
        marker = f"{indent}# {MARKER} {lightning.RULE} {lightning.MESSAGE}"
        sketch = [f"{indent}#     {line}" for line in lightning.sketch(statement)]
        block = [line + end for line in (marker, *sketch)]
        above = lines[max(0, statement.lineno - 1 - len(block)) : statement.lineno - 1]
        if above != block:
            lines[statement.lineno - 1 : statement.lineno - 1] = block
    marked = "".join(lines)
    try:
        ast.parse(marked)
    except SyntaxError:  # the statement's line continues another one: the report alone must do
        return text
    return marked


def _statements(tree: ast.Module, lines: set[int]) -> list[ast.stmt]:
    """The innermost statement around each line."""
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            for line in lines:
                if node.lineno <= line <= (node.end_lineno or node.lineno):
                    best = found.get(line)
                    if best is None or node.lineno >= best.lineno:
                        found[line] = node
    return list({statement.lineno: statement for statement in found.values()}.values())
