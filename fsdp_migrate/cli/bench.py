"""`fsdp-migrate bench`: parse, run the rows, print the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_migrate.cli.output import exits, print_json, stderr, stdout
from fsdp_migrate.errors import UsageError

if TYPE_CHECKING:
    from fsdp_migrate.verify.bench.outcome import Outcome
    from fsdp_migrate.verify.bench.setup import Setup
    from fsdp_migrate.verify.bench.table import Line, Table

MIB = 2**20
CPU_RANKS = 4
FILE_WIDTH = 132  # columns of a table that isn't read on a terminal


def bench(
    hf_config: Annotated[
        Path | None,
        typer.Option(help="Folder with a transformers config.json: the model, random weights."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="MODULE:FUNCTION that returns an nn.Module.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Of the computation: fp32 or bf16.")] = "bf16",
    steps: Annotated[int, typer.Option(help="Timed steps a row.")] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before the timed ones.")] = 5,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks; by default one per GPU, or 4 on a CPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rows: Annotated[
        str, typer.Option(help="Only these, by name, with commas between; default all.")
    ] = "",
    block: Annotated[
        str | None, typer.Option(help="Class of the modules to shard one by one; default found.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="For --model, where its embedding does not tell.")
    ] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Peak of one device, for MFU, where it is not known.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds a row may take.")] = 1800,
    out: Annotated[Path, typer.Option(help="Folder for bench.csv, .json, .png and logs.")] = Path(
        "fsdp-migrate-bench"
    ),
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier bench there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """
    Compare DDP, FSDP1 and every kind of FSDP2 on this machine: speed, memory, loss parity.

    Exit code 1: a row crashed, hung, or its losses differ from its reference row's.
    """
    with exits(as_json=as_json):
        from fsdp_migrate.verify.bench.setup import Setup

        kind, ranks = _hardware(device, nproc_per_node)
        setup = Setup(
            hf_config=hf_config,
            factory=model,
            block=block,
            vocab_size=vocab_size,
            batch=batch,
            seq_len=seq_len,
            dtype=dtype,
            steps=steps,
            warmup=warmup,
            ranks=ranks,
            device=kind,
            seed=seed,
        )
        table = _run(setup, rows, out, timeout, peak_tflops, overwrite)
        if as_json:
            from fsdp_migrate.verify.bench.table import as_json as plain

            print_json(plain(table))
        else:
            _show(table, out)
        if not table.all_well:
            raise typer.Exit(1)


def _hardware(device: str, wanted: int | None) -> tuple[str, int]:
    """The kind of device and the number of ranks."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    ranks = (gpus if device == "cuda" else CPU_RANKS) if wanted is None else wanted
    if device == "cuda" and (gpus == 0 or ranks > gpus):
        raise UsageError(f"--device cuda with {ranks} ranks: this machine has {gpus} GPUs")
    return device, ranks


def _run(
    setup: Setup,
    rows: str,
    out: Path,
    timeout: float,
    peak_tflops: float | None,
    overwrite: bool,
) -> Table:
    from fsdp_migrate.verify import bench as benching
    from fsdp_migrate.verify.bench.models import model_of
    from fsdp_migrate.verify.bench.rows import ROWS, named

    model_of(setup).check()
    messages = stderr()
    table = benching.bench(
        setup,
        named(rows.split(",")) if rows else ROWS,
        out,
        timeout=timeout,
        peak_tflops=peak_tflops,
        overwrite=overwrite,
        on_start=lambda row: messages.print(f"{row.title} ..."),
        on_end=lambda outcome: messages.print(f"  {_told(outcome)}", markup=False),
    )
    if importlib.util.find_spec("matplotlib") is None:
        messages.print("no bench.png: it needs matplotlib (pip install 'fsdp-migrate\\[report]')")
    else:
        from fsdp_migrate.verify.bench import chart

        chart.draw(table, out / "bench.png")
    return table


def _told(outcome: Outcome) -> str:
    if outcome.figures is None:
        return f"{outcome.status}: {outcome.reason}"
    return f"{outcome.figures.tokens_per_second:,.0f} tokens/s per rank"


def _show(table: Table, out: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    setup = table.setup
    on_gpu = setup.device == "cuda"
    unit = "GPU" if on_gpu else "rank"
    shown = RichTable(
        title=f"{setup.ranks} x {table.device}, {setup.dtype}, global batch {setup.global_batch} x "
        f"{setup.seq_len}, {setup.steps} steps; tokens/s and peak MiB per {unit}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    shown.add_column("row", overflow="fold")
    memory = ["allocated", "reserved"] if on_gpu else ["host RSS"]
    for name in ("tokens/s", "vs FSDP1", "MFU", *memory, "step ms (IQR)", "loss difference"):
        shown.add_column(name, justify="right")
    for line in table.lines:
        shown.add_row(line.title, *_cells(line, on_gpu))
    console = stdout()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    console.print(shown)
    for line in table.lines:
        if line.reason:
            console.print(f"{line.title}: {line.status}: {line.reason}", markup=False)
    if any(line.reference == "fsdp1-frozen" for line in table.lines):
        console.print("Frozen rows are held against FSDP1 with the same half frozen.")
    if table.mfu_note:
        console.print(f"MFU n/a: {table.mfu_note}", markup=False)
    console.print(f"written to {out}", markup=False)


def _cells(line: Line, on_gpu: bool) -> list[str]:
    peaks = [line.peak_allocated, line.peak_reserved] if on_gpu else [line.host_rss]
    if line.step_median is None or line.step_q1 is None or line.step_q3 is None:
        return [line.status, "", "", *("" for _ in peaks), "", ""]
    iqr = line.step_q3 - line.step_q1
    return [
        f"{line.tokens_per_second_per_gpu:,.0f}",
        "n/a" if line.ratio is None else f"{line.ratio:.2f}",
        "n/a" if line.mfu is None else f"{line.mfu:.1%}",
        *("n/a" if peak is None else f"{peak / MIB:,.0f}" for peak in peaks),
        f"{line.step_median * 1e3:.1f} ({iqr * 1e3:.1f})",
        _parity(line),
    ]


def _parity(line: Line) -> str:
    if line.parity is None:
        return f"n/a ({line.reference} did not run)"
    if line.name == line.reference:
        return "reference"
    if line.parity == "differs":
        return f"DIFFERS {line.loss_difference:.0e}, norm {line.gradient_norm_difference:.0e}"
    return line.parity if line.parity == "bitwise" else f"{line.loss_difference:.0e}"
