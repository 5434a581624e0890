"""
Source text in, rewritten text and sites out, for one module.

Three passes: collect (names, scopes, FSDP1 uses), decide (each rule asks for edits and accounts
for uses), apply (all edits at once, imports last). Nothing is executed.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import libcst as cst

from fsdp_migrate.errors import Corrupt
from fsdp_migrate.rewrite.dead import drop_dead
from fsdp_migrate.rewrite.file import File, Parsed
from fsdp_migrate.rewrite.imports import Kept, references, settle
from fsdp_migrate.rewrite.names import Names
from fsdp_migrate.rewrite.options import Options
from fsdp_migrate.rewrite.project import Project, package_of
from fsdp_migrate.rewrite.report import Result
from fsdp_migrate.rewrite.rules import ARGUMENT_RULES, RULES, WRAPPING
from fsdp_migrate.rewrite.tree import Tree

_SIGNS = (
    "fsdp",
    "fullysharded",
    "fully_sharded",
    ".clip_grad_norm_(",
    ".no_sync",
    "apply_activation_checkpointing",
)


def interesting(text: str) -> bool:
    """Whether a file may hold anything to do; decided on its text, before it is parsed."""
    lower = text.lower()
    return any(sign in lower for sign in _SIGNS)


def parse(text: str, path: str) -> Parsed:
    """Raises Corrupt when the text is not Python."""
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, UnicodeError, RecursionError) as error:
        raise Corrupt(f"{path}: is not valid Python: {_where(error)}") from None
    tree = Tree(module)
    return Parsed(path, text, tree, Names(tree, package_of(Path(path))))


def rewrite_source(
    text: str,
    options: Options | None = None,
    *,
    path: str = "<source>",
    project: Project | None = None,
) -> Result:
    """Rewrite one module's text. Raises Corrupt when it does not parse."""
    if not interesting(text):
        return Result(path, text, text)
    return rewrite(parse(text, path), options or Options(), project or Project())


def rewrite(parsed: Parsed, options: Options, project: Project) -> Result:
    file = File(parsed, options, project)
    file.argument_rules = ARGUMENT_RULES
    for rule in RULES:
        if file.dual or file.skips.whole_file:
            break
        if rule is RULES[WRAPPING] and (place := _waits_for(file)):
            file.skip_all(f"waits for the FSDP call at {place}: nothing is left half migrated")
            break
        if options.wants(rule.name) and (options.unsafe or not rule.unsafe):
            file.rule = rule.name
            if rule.sweeps:
                drop_dead(file)
            rule().decide(file)
    if file.skips.whole_file:
        file.skip_all("the user's comment asks to skip the file")
    return Result(parsed.path, parsed.text, _apply(file), file.sites)


def _waits_for(file: File) -> str | None:
    """
    The FSDP call that is left, when no call of the run could be rewritten.

    Then the models stay FSDP1's, and everything that handles them must too.
    """
    if file.wraps or file.factories or file.project.wrapped:
        return None
    here = [f"{file.path}:{file.tree.line(call)}" for call in file.left]
    return next(iter([*here, *file.project.left]), None)


def decide_wraps(parsed: Parsed, options: Options, project: Project) -> tuple[int, tuple[str, ...]]:
    """How many FSDP calls of a file can be rewritten, and where those are that cannot."""
    file = File(parsed, options, project)
    file.argument_rules = ARGUMENT_RULES
    for rule in RULES[:WRAPPING]:
        if not file.dual and not file.skips.whole_file and options.wants(rule.name):
            file.rule = rule.name
            rule().decide(file)
    done = len(file.wraps) + file.factories
    return done, tuple(f"{file.path}:{file.tree.line(call)}" for call in file.left)


def _apply(file: File) -> str:
    if not file.edits:
        return file.text
    uses = references(file.tree, file.names)
    module = file.edits.apply()
    kept = Kept(file.path, file.project.exported(file.path))
    after = settle(module, file.needs, uses, kept).code
    _check(after)
    return after


def _check(text: str) -> None:
    """What is written must be Python; ast is quick, libcst knows newer grammar."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        cst.parse_module(text)


def _where(error: Exception) -> str:
    if isinstance(error, cst.ParserSyntaxError):
        return f"line {error.raw_line}: {error.message.splitlines()[0]}"
    return str(error)
