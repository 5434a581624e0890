"""`fsdp-migrate verify`: run a script before and after, and say whether they train the same."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fsdp_migrate.cli.migrated import migrated
from fsdp_migrate.cli.output import exits, print_json, stderr
from fsdp_migrate.cli.parity import progress, show
from fsdp_migrate.errors import SourceError, TargetError, UsageError

if TYPE_CHECKING:
    from fsdp_migrate.verify.experiment import Experiment
    from fsdp_migrate.verify.launchers import Launcher

LAUNCHERS = ("torchrun", "slurm")


def verify(
    script: Annotated[Path, typer.Argument(help="The FSDP1 training script.", show_default=False)],
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of both scripts, after `--`.")
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(help="The FSDP2 script; by default SCRIPT as rewrite-code rewrites it."),
    ] = None,
    before_args: Annotated[
        str | None, typer.Option(help="Arguments of the first script only, as one string.")
    ] = None,
    after_args: Annotated[
        str | None, typer.Option(help="Arguments of the second script only, as one string.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 20,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node.")] = 2,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    launcher: Annotated[str, typer.Option(help="torchrun or slurm.")] = "torchrun",
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first node, for torchrun on several.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[
        int, typer.Option(help="Seed of both runs, where the script sets none.")
    ] = 1234,
    same_init: Annotated[
        bool, typer.Option("--same-init", help="Start the second run from the first's weights.")
    ] = False,
    modes: Annotated[str, typer.Option(help="exact, native, or both.")] = "exact,native",
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without progress that count as a hang.")
    ] = 300.0,
    out: Annotated[
        Path | None, typer.Option(help="Where result.json, logs and traces go; must not exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    print_script: Annotated[
        bool, typer.Option("--print-script", help="Write the launch script instead of running it.")
    ] = False,
) -> None:
    """Run the script before and after, and prove loss parity or show where it breaks."""
    with exits(as_json=as_json):
        from fsdp_migrate.verify.experiment import Experiment, Side

        _check_names(script=script, after=after, launcher=launcher, device=device)
        if nproc_per_node * nnodes < 2:
            raise UsageError("one rank shards nothing: verify needs at least two")
        start = _launcher(launcher, rdzv_endpoint, nnodes)
        if not (print_script or start.leads):
            _follow(out, start, timeout, as_json=as_json)
        folder = _folder(out, nnodes)
        second = after or migrated(script, folder / "rewritten")
        experiment = Experiment(
            before=Side(script.resolve(), (*(args or ()), *shlex.split(before_args or ""))),
            after=Side(second.resolve(), (*(args or ()), *shlex.split(after_args or ""))),
            folder=folder,
            steps=steps,
            seed=seed,
            device=device,
            modes=_modes(modes),
            same_init=same_init,
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            timeout=timeout,
        )
        if print_script:
            _print_scripts(experiment, start)
            return
        _run(experiment, start, as_json=as_json)


def _run(experiment: Experiment, launcher: Launcher, *, as_json: bool) -> None:
    from fsdp_migrate.verify import report
    from fsdp_migrate.verify.experiment import run
    from fsdp_migrate.verify.results import as_dict

    console = stderr()
    console.print(f"logs and traces: {experiment.folder}", markup=False)
    with progress(console, experiment.steps) as follow:
        parity = run(experiment, launcher, follow)
    result = as_dict(parity, experiment)
    beside = experiment.folder / "result.json.partial"  # other nodes may be waiting for it
    beside.write_text(json.dumps(result, indent=1))
    beside.rename(experiment.folder / "result.json")
    if not report.write(parity, experiment, experiment.folder):
        console.print("no pictures: they need matplotlib (fsdp-migrate's extra: report)")
    console.print(f"report: {experiment.folder / 'report.html'}", markup=False)
    if as_json:
        print_json(result)
    else:
        show(parity)
    raise typer.Exit(parity.verdict.kind.value)


def _follow(out: Path | None, launcher: Launcher, timeout: float, *, as_json: bool) -> NoReturn:
    """Another node leads: lend this one's ranks, and end as the leader does."""
    from fsdp_migrate.verify.follow import follow
    from fsdp_migrate.verify.verdict import Kind

    if out is None:
        raise UsageError("with several nodes --out must name a folder that all of them see")
    stderr().print("another node leads: waiting for its jobs")
    result = follow(out.resolve(), launcher, timeout)
    verdict = result["verdict"]
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{verdict['title']}: {verdict['message']}")
    raise typer.Exit(Kind[verdict["result"]].value)


def _check_names(*, script: Path, after: Path | None, launcher: str, device: str) -> None:
    for path in filter(None, (script, after)):
        if not path.is_file():
            raise SourceError(f"{path}: no such script")
    if launcher not in LAUNCHERS:
        raise UsageError(f"--launcher {launcher}: expected one of {', '.join(LAUNCHERS)}")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda")


def _modes(text: str) -> tuple[str, ...]:
    from fsdp_migrate.verify.experiment import MODES

    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    if not wanted or set(wanted) - set(MODES):
        raise UsageError(f"--modes {text}: expected {' or '.join(MODES)}, or both with a comma")
    return wanted


def _folder(out: Path | None, nnodes: int) -> Path:
    """A new folder for everything that verify leaves behind."""
    if out is None:
        if nnodes > 1:
            raise UsageError("with several nodes --out must name a folder that all of them see")
        return Path(tempfile.mkdtemp(prefix="fsdp-migrate-verify-"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TargetError(f"{out}: exists and is not an empty folder; name another one")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(f"{out}: cannot be made: {error.strerror}") from None
    return out.resolve()


def _launcher(name: str, endpoint: str | None, nnodes: int) -> Launcher:
    if name == "torchrun":
        from fsdp_migrate.verify.launchers.torchrun import Torchrun

        if nnodes > 1 and endpoint is None:
            raise UsageError(
                "torchrun on several nodes needs --rdzv-endpoint HOST:PORT of the first"
            )
        return Torchrun(endpoint)
    from fsdp_migrate.verify.launchers.slurm import Slurm

    return Slurm()


def _print_scripts(experiment: Experiment, launcher: Launcher) -> None:
    """The job files are written, so that the printed scripts can be run as they are."""
    for job in experiment.jobs():
        job.folder.mkdir(parents=True, exist_ok=True)
        job.write()
        typer.echo(launcher.script(job), nl=False)
