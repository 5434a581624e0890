"""The functions that are written into users' files."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from fsdp_migrate.rewrite import Options, snippets
from fsdp_migrate.rewrite.engine import parse
from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.project import Project

MAKERS: dict[str, Callable[[File], str]] = {
    "shard_units": snippets.shard_units,
    "shard_by_policy": snippets.shard_by_policy,
    "shard_by_policy with init": lambda file: snippets.shard_by_policy(file, init=True),
    "shard_from_meta": snippets.shard_from_meta,
    "shard_from_rank0": snippets.shard_from_rank0,
    "sharding_arguments": snippets.sharding_arguments,
    "load_from_rank0": snippets.load_from_rank0,
    "materialize": snippets.materialize,
    "reset_module": snippets.reset_module,
    "full_params": snippets.full_params,
    "reshard": snippets.reshard,
    "no_sync": lambda file: snippets.no_sync(file, sure=True),
    "no_sync for any model": lambda file: snippets.no_sync(file, sure=False),
}


def a_file(text: str = "import torch\n") -> File:
    return File(parse(text, "train.py"), Options(), Project())


@pytest.mark.parametrize("maker", MAKERS)
def test_is_one_function_that_names_nothing_unknown(maker: str) -> None:
    """A helper is one plain function with a docstring; all it names is imported or a helper."""
    file = a_file()
    name = MAKERS[maker](file)

    (function,) = ast.parse(file.needs.snippets[name]).body
    assert isinstance(function, ast.FunctionDef)
    assert function.name == name
    assert ast.get_docstring(function)
    imported = {local for wanted in file.needs.wanted.values() for local in wanted.values()}
    known = imported | set(file.needs.snippets) | {"torch"} | set(dir(__builtins__))
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and stored(node)}
    bound |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    builtin = {
        "list",
        "reversed",
        "isinstance",
        "sum",
        "set",
        "getattr",
        "len",
        "any",
        "ValueError",
    }
    assert used - bound - known <= builtin


def stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def test_a_taken_name_is_not_used_twice() -> None:
    """Where the user has a function of that name, the helper gets another."""
    file = a_file("import torch\ndef reshard(model): ...\n")

    assert snippets.reshard(file) == "reshard_"
