"""`fsdp-migrate rewrite-code` as a user meets it: output, exit codes, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fsdp_migrate.cli import app
from fsdp_migrate.rewrite.rules import RULES

SCRIPT = """\
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = FSDP(model)
"""
OPEN = """\
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

# TODO(fsdp-migrate): wrap-call which arguments **unknown holds cannot be seen here
model = FSDP(model, **unknown)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rewrite-code", *map(str, arguments)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_by_default_a_diff_is_shown_and_nothing_written(script: Path) -> None:
    """Looking costs nothing."""
    result = run(script)

    assert result.exit_code == 0
    assert "-model = FSDP(model)" in result.stdout and "+fully_shard(model)" in result.stdout
    assert f"{script}:3: rewritten: FullyShardedDataParallel [wrap-call]" in result.stdout
    assert script.read_text() == SCRIPT


def test_write_writes_and_keeps_the_mode(script: Path) -> None:
    """Files are replaced whole, with their permissions."""
    script.chmod(0o750)

    assert run(script, "--write").exit_code == 0
    assert "fully_shard(model)" in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_check_has_an_exit_code_for_each_answer(script: Path) -> None:
    """1: would change; 5: only open questions are left; 0: nothing to do."""
    assert run(script, "--check").exit_code == 1
    assert script.read_text() == SCRIPT
    run(script, "--write")
    assert run(script, "--check").exit_code == 0
    script.write_text(OPEN)
    assert run(script, "--check").exit_code == 5


def test_json_is_one_object(script: Path) -> None:
    """Machines get the sites, the diff and the totals, and nothing else on stdout."""
    report = json.loads(run(script, "--json").stdout)

    assert report["sites"] == [
        {
            "file": str(script),
            "line": 3,
            "api": "FullyShardedDataParallel",
            "state": "rewritten",
            "rule": "wrap-call",
            "message": "fully_shard, in place",
        }
    ]
    assert report["totals"] == {"rewritten": 1, "differs": 0, "todo": 0, "skipped": 0}
    assert report["files"][0]["diff"].startswith(f"--- a/{script}")
    assert report["exit_code"] == 0 and not report["written"]


def test_a_broken_file_gives_exit_code_3_and_the_rest_is_written(script: Path) -> None:
    """One bad file never stops the run."""
    (script.parent / "bad.py").write_text("import fsdp (\n")

    result = run(script.parent, "--write")

    assert result.exit_code == 3
    assert "bad.py" in result.stderr
    assert "fully_shard(model)" in script.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "name the files"),
        (("{script}", "--select", "nonsense"), 2, "there is no rule nonsense"),
        (("{script}", "--explain", "wrap"), 2, "did you mean wrap-call"),
        (("{script}", "--write", "--check"), 2, "--check writes nothing"),
        (("{script}", "--target-torch", "two"), 2, "expected a version"),
        (("{script}", "--target-torch", "2.3"), 2, "came with torch 2.4"),
        (("{script}x",), 3, "no such file"),
        (("{script}", "--report", "{script}/x.md"), 4, "cannot be written"),
    ],
)
def test_misuse_is_said_in_one_message(
    script: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """Every mistake has its exit code, a message, and no traceback."""
    result = run(*(argument.format(script=script) for argument in arguments))

    assert result.exit_code == code
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_errors_are_json_too(script: Path) -> None:
    """Under --json an error is the one object."""
    report = json.loads(run(script, "--json", "--select", "nonsense").stdout)

    assert report["error"]["exit_code"] == 2


def test_rules_are_listed_and_explained() -> None:
    """The list and the explanation come from the rules themselves."""
    listed = run("--list-rules").stdout

    assert all(rule.name in listed for rule in RULES)
    explained = run("--explain", "no-sync").stdout
    assert "Before:" in explained and "set_requires_gradient_sync" in explained


def test_the_report_is_a_page(script: Path) -> None:
    """A review gets a table a file."""
    page = script.parent / "report.md"
    run(script, "--report", page)

    assert "| 3 | rewritten | `FullyShardedDataParallel` | wrap-call |" in page.read_text()


def test_settings_come_from_pyproject(script: Path) -> None:
    """A project's own settings hold; the command line is stronger."""
    settings = script.parent / "pyproject.toml"
    settings.write_text('[tool.fsdp-migrate]\nignore = ["wrap-call"]\ntarget-torch = "2.4"\n')

    assert "fully_shard" not in run(script).stdout
    assert "_composable.fsdp import fully_shard" in run(script, "--ignore", "no-sync").stdout
    settings.write_text("[tool.fsdp-migrate]\nignored = 3\n")
    assert run(script).exit_code == 2
    settings.write_text("[tool.fsdp-migrate\n")
    assert run(script).exit_code == 3


def test_two_processes_give_what_one_gives(script: Path) -> None:
    """--jobs changes the speed alone."""
    for number in range(4):
        (script.parent / f"more{number}.py").write_text(SCRIPT)

    assert run(script.parent, "--jobs", 2).stdout == run(script.parent).stdout
