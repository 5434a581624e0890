"""A script as rewrite-code rewrites it, in a copy of its folder: the second run of `verify`."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from fsdp_migrate.errors import OpenQuestion, SourceError

SKIPPED = {"__pycache__", ".git", ".venv", "venv", "node_modules"}


def migrated(script: Path, copy: Path) -> Path:
    """
    The rewritten script in `copy`, a new folder.

    Python files are copied, everything else is linked to. Raises OpenQuestion when rewrite-code
    leaves a place to the user in a file that the script uses.
    """
    from fsdp_migrate.rewrite import rewrite_files

    home = script.resolve().parent

    def left_out(folder: str, names: list[str]) -> set[str]:
        inside = {name for name in names if copy.is_relative_to(Path(folder, name))}
        return inside | (SKIPPED & set(names))

    shutil.copytree(home, copy, ignore=left_out, copy_function=_copy_or_link)
    target = copy / script.resolve().name
    open_sites = []
    for result in rewrite_files(sorted(_used(target, copy))):
        if result.error:
            raise SourceError(f"rewrite-code: {result.error}")
        open_sites += [site for site in result.sites if site.state == "todo"]
        if result.changed:
            Path(result.path).write_text(result.after)
    if open_sites:
        places = [
            f"  {home / Path(site.file).relative_to(copy)}:{site.line}: {site.message}"
            for site in open_sites[:5]
        ]
        first = "\n".join(places)
        raise OpenQuestion(
            f"rewrite-code leaves {len(open_sites)} places to you, so nothing can run yet:\n"
            f"{first}\nSettle them and give the result with --after."
        )
    return target


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith(".py"):
        shutil.copyfile(source, target)
    else:
        Path(target).symlink_to(Path(source).resolve())


def _used(script: Path, root: Path) -> set[Path]:
    """The script and the files of its folder that it imports, directly or not."""
    found, waiting = set(), [script]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:
            continue  # rewrite-code says so itself
        for node in ast.walk(tree):
            for name in _modules(node):
                base = root.joinpath(*name.split("."))
                near = file.parent.joinpath(*name.split("."))
                for module in (base, near):
                    waiting += [module.with_suffix(".py"), module / "__init__.py"]
    return found


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        inside = [f"{module}.{alias.name}".strip(".") for alias in node.names]
        return [*inside, module] if module else inside
    return []
