"""
FSDP1 asked for by an argument of a Python call: transformers' `TrainingArguments(fsdp=...)` and
accelerate's `FullyShardedDataParallelPlugin(...)`, or by command-line words in a list of strings.

Reported and left: the values often come from elsewhere, and the settings live in a file too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fsdp_migrate.rewrite.configs import shell
from fsdp_migrate.rewrite.configs.imports import qualified
from fsdp_migrate.rewrite.report import Site

RULE = "launch-arguments"
PLUGIN = (
    "pass fsdp_version=2 and reshard_after_forward=True or False; leave out sharding_strategy, "
    "backward_prefetch, forward_prefetch, use_orig_params, sync_module_states and limit_all_gathers"
)
TRAINING = "say fsdp=True and fsdp_config={'version': 2, ...}"


def sites(tree: ast.Module, names: dict[str, str], path: str) -> list[Site]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [
                Site(path, line, api, "todo", RULE, message)
                for line, api, message in _calls(node, names)
            ]
        elif isinstance(node, ast.List | ast.Tuple):
            found += _words(node, path)
    return found


def _calls(node: ast.Call, names: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    name = qualified(node.func, names)
    library, last = name.partition(".")[0], name.rpartition(".")[2]
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if library == "accelerate" and last == "FullyShardedDataParallelPlugin":
        if _constant(keywords.get("fsdp_version")) != 2:
            yield node.lineno, last, PLUGIN
    elif library in ("transformers", "trl") and "fsdp" in keywords:
        value = keywords["fsdp"]
        off = isinstance(value, ast.Constant) and not value.value
        if not off and not _chooses_2(keywords.get("fsdp_config")):
            yield value.lineno, f"{last}(fsdp=)", TRAINING


def _chooses_2(config: ast.expr | None) -> bool:
    if not isinstance(config, ast.Dict):
        return False
    pairs = zip(config.keys, config.values, strict=True)
    return any(
        _constant(key) in ("version", "fsdp_version") and _constant(value) == 2
        for key, value in pairs
    )


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _words(node: ast.List | ast.Tuple, path: str) -> list[Site]:
    """Command-line words in a list of strings, read as the shell would read them."""
    found: list[Site] = []
    for item, following in zip(node.elts, [*node.elts[1:], None], strict=False):
        word, value = _constant(item), _constant(following)
        if not isinstance(word, str) or not word.startswith(("--fsdp", "--use_fsdp")):
            continue
        line = f"{word} '{value}'" if isinstance(value, str) else word
        found += [
            Site(path, item.lineno, s.api, s.state, s.rule, s.message)
            for s in shell.sites(line, path)
        ]
    return found
