"""The command line, run in this process."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fsdp_migrate.cli import app


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: object) -> Outcome:
    """Run `fsdp-migrate ARGUMENTS`; an exception that escapes is raised here, as a bug."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def converted(source: Path, output: Path, to: str, *arguments: object) -> Path:
    """Convert, which must succeed; gives the output."""
    outcome = run("convert-ckpt", source, output, "--to", to, *arguments)
    assert outcome.code == 0, outcome.err
    return output


def refused(code: int, *arguments: object) -> str:
    """Run what must fail with `code`; gives the message, which must be one and no traceback."""
    outcome = run(*arguments)
    assert outcome.code == code, (outcome.code, outcome.out, outcome.err)
    assert outcome.err.count("error:") == 1 and "Traceback" not in outcome.err
    return outcome.err
