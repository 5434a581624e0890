"""
Speed and memory of convert-ckpt against what one would use instead, in the same run.

Every row is a ratio of wall times, taken in turns (see `timing.py`), and the peak memory of the
process; "must" is what the project promises, "met" whether this run on this machine met it. Nothing
fails here but a conversion that fails. `--gb` is the size of the model (default 4), `--rows` picks
some of them, `--folder` is the disk to measure (default: the temporary folder).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from timing import Command, Pair, ours_and_theirs, remove, run

HERE = Path(__file__).parent
MB = 1e6


@dataclass(frozen=True, slots=True)
class Bench:
    """Where sources are made and outputs written; each source is made once, when first wanted."""

    folder: Path
    nbytes: int
    repeats: int

    def source(self, kind: str, nbytes: int | None = None) -> Path:
        nbytes = nbytes or self.nbytes
        path = self.folder / f"{kind}-{nbytes}"
        if not path.exists():
            if kind == "dcp":
                ranks = self.source("sharded-tensor", nbytes)
                run(convert(ranks, path, "dcp", "--ranks", "4", "--no-verify"))
            elif kind == "405b":
                run([sys.executable, HERE / "forge_large.py", path, "512" if self.large else "2"])
            else:
                run([sys.executable, HERE / "make_source.py", kind, path, str(nbytes)])
        return path

    @property
    def large(self) -> bool:
        return self.nbytes >= 1 << 29

    def against(self, theirs: Callable[[Path], Command], source: Path, *how: str) -> Pair:
        output = self.folder / "output"
        return ours_and_theirs(
            lambda out: convert(source, out, *how), theirs, source, output, self.repeats
        )

    def against_cp(self, source: Path, *how: str) -> Pair:
        return self.against(lambda out: ["cp", "-r", source, out], source, *how)


def convert(source: Path, output: Path, to: str, *options: str) -> Command:
    return [*TOOL, "convert-ckpt", source, output, "--to", to, *options]


TOOL = (sys.executable, "-m", "fsdp_migrate")

Row = Callable[[Bench], Iterator[str]]


def copies(bench: Bench) -> Iterator[str]:
    """Conversions against `cp -r` of the same files."""
    for kind in ("sharded-tensor", "dtensor"):
        ranks = bench.source(kind)
        pair = bench.against_cp(ranks, "hf", "--no-verify")
        yield row(f"4 {kind} files -> hf, not verified", pair, "cp", 1.0, 150)
        if kind == "dtensor":
            shutil.rmtree(ranks)
    ranks = bench.source("sharded-tensor")
    yield row("the same, verified", bench.against_cp(ranks, "hf"), "cp", 2.0, None)
    pair = bench.against_cp(ranks, "dcp", "--no-verify")
    yield row("rank files -> dcp, not verified", pair, "cp", 1.3, 350)
    pair = bench.against_cp(bench.source("dcp"), "hf", "--no-verify")
    yield row("DCP -> hf, not verified", pair, "cp", 1.3, 350)


def local(bench: Bench) -> Iterator[str]:
    """Flat parameters and Adam's moments, un-flattened."""
    source = bench.source("local")
    options = ("--layout", str(source / "layout.json"), "--no-verify")
    pair = bench.against_cp(source, "dcp", *options)
    yield row("LOCAL with optimizer -> dcp, not verified", pair, "cp", 1.3, 350)
    shutil.rmtree(source)


def links(bench: Bench) -> Iterator[str]:
    """Renaming a DCP directory copies no tensor's bytes."""
    source, output = bench.source("dcp"), bench.folder / "output"
    used = run(convert(source, output, "dcp", "--rename", "^model=renamed", "--no-verify"))
    new = sum(f.stat().st_blocks * 512 for f in output.rglob("*") if f.stat().st_nlink == 1)
    remove(output)
    yield (
        f"{'DCP -> dcp with renames':44} {used.wall:6.2f} s, {new / MB:.1f} MB of "
        f"{bench.nbytes / MB:.0f} MB written anew (must: no tensor's bytes), peak "
        f"{used.memory / MB:.0f} MB"
    )


def alternatives(bench: Bench) -> Iterator[str]:
    """What scripts do today."""
    script = HERE / "alternatives.py"
    for name, kind, source, to in (
        ("load, concatenate, save", "concatenate", bench.source("sharded-tensor"), "hf"),
        ("dcp_to_torch_save", "dcp", bench.source("dcp"), "torch"),
    ):
        pair = bench.against(
            lambda out, kind=kind, source=source: [sys.executable, script, kind, source, out],
            source, to, "--no-verify",
        )  # fmt: skip
        faster, less = 1 / pair.ratio, pair.theirs.memory / pair.ours.memory
        yield (
            f"{'against ' + name:44} {faster:6.1f} x faster, {less:.1f} x less memory "
            f"({pair.theirs.memory / MB:.0f} MB)   must >= 4 x, >= 8 x   "
            f"{verdict(faster >= 4 and less >= 8)}"
        )


def memory(bench: Bench) -> Iterator[str]:
    """Peak memory at a quarter and at twice the size."""
    peaks: dict[str, list[int]] = {}
    for nbytes in (bench.nbytes // 4, bench.nbytes * 2):
        ranks = bench.source("sharded-tensor", nbytes)
        for how in (("hf",), ("dcp",), ("torch",)):
            output = bench.folder / "output"
            peaks.setdefault(how[0], []).append(run(convert(ranks, output, *how)).memory)
            remove(output)
        shutil.rmtree(ranks)
    for to, (small, big) in peaks.items():
        yield (
            f"{f'rank files -> {to}, {bench.nbytes / 4e9:.2g} and {bench.nbytes / 5e8:.2g} GB':44}"
            f" peak {small / MB:.1f} and {big / MB:.1f} MB: {big / small - 1:+.1%}   "
            f"must <= 10 %   {verdict(big <= 1.1 * small)}"
        )


def large(bench: Bench) -> Iterator[str]:
    """Index and plan of a 405B model with its optimizer on 512 ranks."""
    source, output = bench.source("405b"), bench.folder / "output"
    for how in (("hf",), ("dcp",), ("dcp", "--ranks", "256" if bench.large else "4")):
        used = run(convert(source, output, *how, "--dry-run"))
        met = used.wall <= 60 and used.memory <= 4e9
        yield (
            f"{'405B of 512 ranks, plan for ' + ' '.join(how):44} {used.wall:6.1f} s "
            f"({used.cpu:.1f} s of processor time), peak {used.memory / 1e9:.2f} GB   "
            f"must <= 60 s, <= 4 GB   {verdict(met)}"
        )


def help_text(bench: Bench) -> Iterator[str]:
    runs = [run([*TOOL, "--help"]) for _ in range(max(bench.repeats, 5))]
    wall = sorted(used.wall for used in runs)[len(runs) // 2]
    yield f"{'--help':44} {wall:6.2f} s   must <= 0.3 s   {verdict(wall <= 0.3)}"


ROWS: tuple[Row, ...] = (help_text, copies, links, alternatives, local, large, memory)


def row(name: str, pair: Pair, against: str, must: float, peak: float | None) -> str:
    met = pair.ratio <= must and (peak is None or pair.ours.memory <= peak * MB)
    bounds = f"<= {must:.1f} x" + (f", <= {peak:.0f} MB" if peak else "")
    return (
        f"{name:44} {pair.ratio:6.2f} x {against} ({pair.ours.wall:.2f} s, {against} "
        f"{pair.theirs.wall:.2f} s; processor time {pair.cpu_ratio:.2f} x), peak "
        f"{pair.ours.memory / MB:.0f} MB   must {bounds}   {verdict(met)}"
    )


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


@contextmanager
def workplace(parent: str | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fsdp-migrate-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = float(os.environ.get("FSDP_MIGRATE_BENCH_GB", "4"))
    parser.add_argument("--gb", type=float, default=size, help="size of the model")
    parser.add_argument("--repeats", type=int, default=5)
    known = [row.__name__ for row in ROWS]
    parser.add_argument("--rows", default=",".join(known), help="which, and in which order")
    parser.add_argument("--folder", help="where to make and convert the checkpoints")
    options = parser.parse_args()
    with workplace(options.folder) as folder:
        bench = Bench(folder, int(options.gb * 1e9), options.repeats)
        for name in options.rows.split(","):
            for line in ROWS[known.index(name)](bench):
                print(line, flush=True)


if __name__ == "__main__":
    main()
