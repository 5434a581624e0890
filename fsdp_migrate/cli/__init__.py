"""
The command line: parse, call one function, print, exit.

One module a command. They import the package behind a command only when it runs, so that
`--help` never waits for torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_migrate import __version__
from fsdp_migrate.cli import bench, verify
from fsdp_migrate.cli.rewrite_code import rewrite_code

app = typer.Typer(
    name="fsdp-migrate",
    help="Move a running PyTorch FSDP1 project to FSDP2, and prove it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fsdp-migrate {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command()(verify.verify)
app.command()(bench.bench)
app.command("rewrite-code")(rewrite_code)


def main() -> None:
    app()
