"""`fsdp-migrate rewrite-code`: the arguments, and what the terminal is told."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_migrate.cli.output import exits, print_json, stderr, stdout

if TYPE_CHECKING:
    from fsdp_migrate.rewrite import Options, Result, Site

_COLOURS = {"rewritten": "green", "differs": "yellow", "todo": "red", "skipped": "dim"}


def rewrite_code(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Files and folders.", show_default=False)
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the files.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; exit 1 if anything would change, 5 if TODOs are left."
        ),
    ] = False,
    select: Annotated[
        str | None, typer.Option(metavar="RULE,...", help="Only these rules.")
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(metavar="RULE,...", help="All rules but these.")
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Also rules whose result may differ.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep FSDP1's numerics even where that reads worse.")
    ] = False,
    target_torch: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Oldest torch the result must run on.  [2.6]"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes.  [1]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Write the report as Markdown.")
    ] = None,
    list_rules: Annotated[bool, typer.Option("--list-rules", help="List the rules.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="RULE", help="What a rule does, with examples.")
    ] = None,
) -> None:
    """
    Rewrite FSDP1 training code for FSDP2.

    By default prints a diff and a report of every FSDP1 use found, and writes nothing.
    """
    with exits(as_json=as_json):
        if list_rules or explain is not None:
            _tell_rules(explain, as_json=as_json)
            return
        wanted = list(paths or ())
        options = _options(wanted, select, ignore, target_torch, jobs)
        options = replace(options, unsafe=unsafe or options.unsafe, exact=exact or options.exact)
        code = _run(wanted, options, write=write, check=check, as_json=as_json, report=report)
    raise typer.Exit(code)


def _tell_rules(explain: str | None, *, as_json: bool) -> None:
    from fsdp_migrate.rewrite.explain import explanation, find, summaries

    if explain is not None:
        text = explanation(find(explain))
        if as_json:
            print_json({"rule": explain, "text": text})
        else:
            typer.echo(text, nl=False)
    elif as_json:
        print_json({"rules": [{"name": name, "summary": line} for name, line in summaries()]})
    else:
        width = max(len(name) for name, _ in summaries())
        for name, line in summaries():
            typer.echo(f"{name:{width}}  {line}")


def _options(
    paths: Sequence[Path],
    select: str | None,
    ignore: str | None,
    target_torch: str | None,
    jobs: int | None,
) -> Options:
    from fsdp_migrate.errors import UsageError
    from fsdp_migrate.rewrite.explain import check
    from fsdp_migrate.rewrite.settings import from_pyproject, version

    if not paths:
        raise UsageError("name the files and folders to rewrite")
    options = from_pyproject(paths[0] if paths[0].exists() else Path())
    if select is not None:
        options = replace(options, select=_names(select))
    if ignore is not None:
        options = replace(options, ignore=_names(ignore))
    if target_torch is not None:
        options = replace(options, target_torch=version(target_torch))
    if jobs is not None:
        options = replace(options, jobs=jobs)
    check((*options.select, *options.ignore))
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _run(
    paths: Sequence[Path],
    options: Options,
    *,
    write: bool,
    check: bool,
    as_json: bool,
    report: Path | None,
) -> int:
    from fsdp_migrate.errors import UsageError
    from fsdp_migrate.rewrite import rewrite_files

    if write and check:
        raise UsageError("--check writes nothing: leave out --write or --check")
    results = rewrite_files(paths, options)
    if write:
        _write(results)
    if report is not None:
        _write_report(results, report)
    code = exit_code(results, check=check)
    if as_json:
        print_json(_as_json(results, written=write, code=code))
    else:
        if not write and not check:
            _print_diffs(results)
        _print_report(results, write=write)
    return code


def exit_code(results: Sequence[Result], *, check: bool) -> int:
    """3 if a file could not be handled; under --check 1 for changes, 5 for open questions."""
    if any(result.error is not None for result in results):
        return 3
    if check and any(result.changed for result in results):
        return 1
    todos = any(site.state == "todo" for result in results for site in result.sites)
    return 5 if check and todos else 0


def _write(results: Sequence[Result]) -> None:
    from fsdp_migrate.rewrite.source import Source

    for result in results:
        if result.changed:
            path = Path(result.path)
            Source.read(path).write(path, result.after)


def _write_report(results: Sequence[Result], path: Path) -> None:
    from fsdp_migrate.errors import TargetError
    from fsdp_migrate.rewrite.markdown import page

    try:
        path.write_text(page(results), encoding="utf-8")
    except OSError as error:
        raise TargetError(f"{path}: cannot be written: {error.strerror}") from None


def _as_json(results: Sequence[Result], *, written: bool, code: int) -> dict[str, Any]:
    from fsdp_migrate.rewrite import totals

    return {
        "files": [
            {
                "path": result.path,
                "changed": result.changed,
                "error": result.error,
                "diff": diff(result),
            }
            for result in results
            if result.changed or result.error or result.sites
        ],
        "sites": [asdict(site) for result in results for site in result.sites],
        "totals": totals(results),
        "written": written,
        "exit_code": code,
    }


def diff(result: Result) -> str:
    if not result.changed:
        return ""
    before, after = (text.splitlines(keepends=True) for text in (result.before, result.after))
    lines = difflib.unified_diff(before, after, f"a/{result.path}", f"b/{result.path}")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _print_diffs(results: Sequence[Result]) -> None:
    console = stdout()
    for result in results:
        for line in diff(result).splitlines():
            style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            console.print(line, style=style, markup=False, emoji=False)


def _print_report(results: Sequence[Result], *, write: bool) -> None:
    from fsdp_migrate.rewrite import totals

    console = stdout()
    for result in results:
        if result.error is not None:
            stderr().print(f"error: {result.error}", markup=False, style="red")
        for site in result.sites:
            _print_site(console, site)
    changed = sum(result.changed for result in results)
    found = totals(results)
    said = ", ".join(f"{count} {state}" for state, count in found.items())
    verb = "rewritten" if write else "would change"
    console.print(f"{len(results)} files, {changed} {verb}; {said}", markup=False)
    if changed and not write:
        stderr().print("nothing was written; --write writes", markup=False)


def _print_site(console: Any, site: Site) -> None:
    where = f"{site.file}:{site.line}"
    text = f"{where}: {site.state}: {site.api} [{site.rule}] {site.message}"
    console.print(text, style=_COLOURS[site.state], markup=False, emoji=False)
