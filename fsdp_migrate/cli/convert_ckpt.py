"""`fsdp-migrate convert-ckpt`, `inspect-ckpt` and `compare-ckpt`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_migrate.cli.output import exits, print_json, stdout
from fsdp_migrate.errors import UsageError

if TYPE_CHECKING:
    from fsdp_migrate.checkpoint.convert import Converted, Prepared, Request

SOURCE = Annotated[Path, typer.Argument(help="A checkpoint: file or folder, of any format.")]
MODEL = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MODULE:FACTORY",
        help="Flat parameters: a function that builds the model (called on the meta device).",
    ),
]
HF_CONFIG = Annotated[
    Path | None,
    typer.Option("--hf-config", metavar="DIR", help="Folder of the model's config.json."),
]
LAYOUT = Annotated[
    Path | None,
    typer.Option("--layout", metavar="FILE", help="Flat parameters: layout as inspect-ckpt emits."),
]
SOURCE_TORCH = Annotated[
    str | None,
    typer.Option("--source-torch", metavar="VERSION", help="The torch that wrote SOURCE."),
]
MODEL_ROOT = Annotated[
    str | None, typer.Option("--model-root", help="Which model, where a file holds several.")
]
OPTIMIZER_ROOT = Annotated[
    str | None, typer.Option("--optimizer-root", help="Which optimizer, where there are several.")
]
OPTIMIZER = Annotated[
    Path | None,
    typer.Option("--optimizer", metavar="PATH", help="Where the optimizer is, if not in SOURCE."),
]
JSON = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def convert_ckpt(
    source: SOURCE,
    output: Annotated[Path, typer.Argument(help="What to write; must not exist yet.")],
    to: Annotated[str, typer.Option("--to", metavar="dcp|fsdp2|hf|torch", help="Target format.")],
    dtype: Annotated[
        str, typer.Option(help="Floating parameters as: keep, float32, bfloat16 or float16.")
    ] = "keep",
    ranks: Annotated[int | None, typer.Option(help="dcp, fsdp2: cut for that many ranks.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="RxS", help="fsdp2: HSDP mesh, replicas x shards.")
    ] = None,
    mesh_names: Annotated[
        str | None,
        typer.Option(
            metavar="A[,B]|none",
            help="fsdp2: mesh_dim_names of the model's mesh; by default verl's fsdp or ddp,fsdp.",
        ),
    ] = None,
    device_type: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|cpu|xpu",
            help="fsdp2: device type of the model's mesh; by default what the torch here is for.",
        ),
    ] = None,
    keys: Annotated[
        str, typer.Option(metavar="plain|accelerate|torchtitan", help="dcp: names of the keys.")
    ] = "plain",
    target_torch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The torch that will read the output.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="hf: size of a file, like 5GB or 500MiB.")
    ] = "5GB",
    optimizer: OPTIMIZER = None,
    no_optimizer: Annotated[
        bool, typer.Option("--no-optimizer", help="Leave the optimizer out.")
    ] = False,
    select: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="Only names that begin so.")
    ] = None,
    strip_prefix: Annotated[str, typer.Option(metavar="P", help="Take P off every name.")] = "",
    renames: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="REGEX=REPL", help="Rename, model and optimizer alike."),
    ] = None,
    model: MODEL = None,
    hf_config: HF_CONFIG = None,
    layout: LAYOUT = None,
    source_torch: SOURCE_TORCH = None,
    model_root: MODEL_ROOT = None,
    optimizer_root: OPTIMIZER_ROOT = None,
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy data files where hard links would do.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the output back.")
    ] = False,
    sync: Annotated[bool, typer.Option("--sync", help="Wait until the disk has it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Convert a checkpoint, model and optimizer, to what FSDP2, DCP or Hugging Face loads."""
    with exits(as_json=as_json):
        from fsdp_migrate.checkpoint.convert import Request, convert, prepare
        from fsdp_migrate.checkpoint.load import LoadOptions
        from fsdp_migrate.checkpoint.names import NameOptions, parse_rename
        from fsdp_migrate.checkpoint.sidecars import hf_files
        from fsdp_migrate.checkpoint.writers import TargetOptions
        from fsdp_migrate.cli.progress import stages

        files, config = hf_files(source, hf_config) if to == "hf" else ((), None)
        request = Request(
            source=source,
            output=output,
            to=to,
            load=LoadOptions(
                with_optimizer=not no_optimizer and to != "hf",
                optimizer_from=optimizer,
                model_root=model_root,
                optimizer_root=optimizer_root,
                model=model,
                hf_config=hf_config,
                layout=layout,
                source_torch=source_torch,
            ),
            names=NameOptions(
                strip_prefix,
                tuple(parse_rename(text) for text in renames or ()),
                tuple(select or ()),
            ),
            target=TargetOptions(
                dtype=dtype,
                ranks=ranks,
                mesh=_mesh(mesh),
                mesh_dim_names=_mesh_names(mesh_names),
                keys=keys,  # type: ignore[arg-type]
                target_torch=target_torch,
                device_type=device_type,
                max_shard_size=parse_size(max_shard_size),
                sidecars=files,
                hf_config=config,
                copy=copy,
            ),
            verify=not no_verify,
            overwrite=overwrite,
            sync=sync,
        )
        converted = None
        if dry_run:
            prepared = prepare(request)
        else:
            with stages(shown=not as_json) as stage:
                converted = convert(request, stage)
            prepared = converted.prepared
        if as_json:
            print_json(_summary(request, prepared, converted))
        else:
            _show(request, prepared, converted)


def inspect_ckpt(
    source: SOURCE,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    emit_layout: Annotated[
        Path | None,
        typer.Option("--emit-layout", metavar="FILE", help="Write the layout, for --layout."),
    ] = None,
    optimizer: OPTIMIZER = None,
    model: MODEL = None,
    hf_config: HF_CONFIG = None,
    layout: LAYOUT = None,
    source_torch: SOURCE_TORCH = None,
    model_root: MODEL_ROOT = None,
    optimizer_root: OPTIMIZER_ROOT = None,
    as_json: JSON = False,
) -> None:
    """Say what a checkpoint is: format, ranks, parameters, optimizer, oddities."""
    with exits(as_json=as_json):
        from fsdp_migrate.checkpoint.inspect import report, write_layout
        from fsdp_migrate.checkpoint.load import LoadOptions, load

        options = LoadOptions(
            optimizer_from=optimizer,
            model=model,
            hf_config=hf_config,
            layout=layout,
            source_torch=source_torch,
            model_root=model_root,
            optimizer_root=optimizer_root,
        )
        loaded = load(source, options, for_inspection=True)
        if emit_layout is not None:
            write_layout(loaded, emit_layout)
        found = report(loaded)
        if as_json:
            value = asdict(found)
            if not tensors:
                value["tensors"] = len(found.tensors)
            print_json(value)
        else:
            _show_report(found, tensors)


def compare_ckpt(
    a: Annotated[Path, typer.Argument(help="A checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another, of any format.")],
    no_optimizer: Annotated[
        bool, typer.Option("--no-optimizer", help="Compare the models only.")
    ] = False,
    model: MODEL = None,
    hf_config: HF_CONFIG = None,
    layout: LAYOUT = None,
    source_torch: SOURCE_TORCH = None,
    as_json: JSON = False,
) -> None:
    """Compare two checkpoints by name, shape, dtype and value; exit 1 if they differ."""
    with exits(as_json=as_json):
        from fsdp_migrate.checkpoint.compare import compare, named_tensors
        from fsdp_migrate.checkpoint.load import LoadOptions, load
        from fsdp_migrate.cli.progress import size, stages

        options = LoadOptions(
            with_optimizer=not no_optimizer,
            model=model,
            hf_config=hf_config,
            layout=layout,
            source_torch=source_torch,
        )
        one, other = load(a, options).index, load(b, options).index
        total = sum(t.nbytes for index in (one, other) for t in named_tensors(index).values())
        with stages(shown=not as_json) as stage:
            result = compare(one, other, stage("comparing", total))
        if as_json:
            print_json(
                {
                    "same": result.same,
                    "compared": result.compared,
                    "differences": [asdict(d) for d in result.differences],
                }
            )
        else:
            out = stdout()
            for difference in result.differences:
                out.print(
                    f"{difference.name}: {difference.kind}: {difference.detail}", markup=False
                )
            verdict = "same" if result.same else f"{len(result.differences)} differences"
            out.print(f"{verdict} ({result.compared} tensors compared, {size(total)} read)")
        if not result.same:
            raise typer.Exit(1)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(text: str) -> int:
    """Bytes from "5GB", "500MiB" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    units = {**_UNITS, **_BINARY}
    if match is None or match[2] not in units:
        raise UsageError(f"--max-shard-size {text!r}: should be a size like 5GB")
    return int(float(match[1]) * units[match[2]])


def _mesh_names(text: str | None) -> tuple[str, ...] | None:
    """ "none" is a mesh without names, which `fully_shard(model)` makes; None is the default."""
    if text is None:
        return None
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _mesh(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise UsageError(f"--mesh {text!r}: should be REPLICASxSHARDS, like 2x4")
    return int(match[1]), int(match[2])


def _summary(request: Request, prepared: Prepared, converted: Converted | None) -> dict[str, Any]:
    plan, index = prepared.plan, prepared.index
    proof = converted.proof if converted else None
    return {
        "source": str(request.source),
        "output": str(request.output),
        "format": prepared.loaded.contents.format,
        "to": request.to,
        "dry_run": converted is None,
        "model_tensors": len(index.model),
        "optimizer_states": len(index.optimizer.state) if index.optimizer else None,
        "bytes": plan.bytes_to_write,
        "files": [
            *({"path": str(file.path), "bytes": file.size} for file in plan.files),
            *({"path": str(c.path), "carried": True, "link": c.link} for c in plan.carried),
        ],
        "renamed": {t.origin: n for n, t in index.model.items() if t.origin != n},
        "verified": proof is not None,
        "verified_tensors": len(proof.hashes) if proof else 0,
        "linked_tensors": len(proof.linked) if proof else 0,
        "notes": list(prepared.notes),
    }


def _show(request: Request, prepared: Prepared, converted: Converted | None) -> None:
    from fsdp_migrate.cli.progress import size

    out, plan, index = stdout(), prepared.plan, prepared.index
    contents = prepared.loaded.contents
    ranks = f", {contents.world_size} ranks" if contents.world_size else ""
    out.print(f"source   {request.source} ({contents.format}{ranks})", markup=False)
    out.print(f"target   {request.output} ({request.to})", markup=False)
    if index.model:
        out.print(f"model    {len(index.model)} tensors, {_dtypes(index.model.values())}")
    if index.optimizer is not None:
        params = {name for group in index.optimizer.groups for name in group.params}
        with_state = sum(1 for name in params if index.optimizer.state.get(name))
        out.print(
            f"optim    state for {with_state} of {len(params)} parameters, "
            f"{len(index.optimizer.groups)} param groups"
        )
    units = prepared.loaded.flat_units
    if units:
        out.print(f"flat     {len(units)} FSDP1 units un-flattened, sizes and padding checked")
    renamed = [(t.origin, n) for n, t in index.model.items() if t.origin != n and not units]
    for old, new in renamed[:5]:
        out.print(f"renamed  {old} -> {new}", markup=False)
    if len(renamed) > 5:
        out.print(f"renamed  and {len(renamed) - 5} more")
    links = sum(1 for carried in plan.carried if carried.link)
    linked = f", {links} hard links" if links else ""
    out.print(f"write    {len(plan.files)} files, {size(plan.bytes_to_write)}{linked}")
    if converted is None:
        for file in plan.files[:20]:
            out.print(f"         {file.path}  {size(file.size)}", markup=False)
    for note in prepared.notes:
        out.print(f"note     {note}", markup=False)
    if converted is None:
        out.print("dry run: nothing was written")
    elif converted.proof is None:
        out.print("done, not verified")
    else:
        proof = converted.proof
        same = f", {len(proof.linked)} are the source's own bytes" if proof.linked else ""
        out.print(
            f"done: the output was read back, {len(proof.hashes)} tensors are equal by hash{same}"
        )


def _dtypes(tensors: Any) -> str:
    from collections import Counter

    from fsdp_migrate.cli.progress import size

    total: Counter[str] = Counter()
    for tensor in tensors:
        total[tensor.dtype] += tensor.nbytes
    return ", ".join(f"{size(count)} {name}" for name, count in total.items())


def _show_report(found: Any, tensors: bool) -> None:
    from fsdp_migrate.cli.progress import size

    out = stdout()
    rows: list[tuple[str, str]] = [("format", found.format)]
    if found.world_size:
        rows.append(("world size", str(found.world_size)))
    rows.append(("sharding", found.strategy))
    if found.writer:
        rows.append(("written by", f"torch {found.writer}"))
    if found.model_roots:
        rows.append(("model at", ", ".join(found.model_roots)))
    for name, (count, elements, total) in found.dtypes.items():
        rows.append(("model", f"{count} tensors, {elements:,} elements, {size(total)} {name}"))
    if found.optimizer_roots:
        rows.append(("optimizer at", ", ".join(found.optimizer_roots)))
    if found.coverage is not None:
        rows.append(
            ("optimizer", f"state for {found.coverage[0]} of {found.coverage[1]} parameters, "
             f"{found.groups} param groups")
        )  # fmt: skip
    for name, (count, elements, total) in found.optimizer_dtypes.items():
        rows.append(("states", f"{count} tensors, {elements:,} elements, {size(total)} {name}"))
    rows += [("tied", " = ".join(names)) for names in found.ties]
    rows += [("FSDP1 unit", name or "(root)") for name in found.flat_units]
    rows += [("note", note) for note in found.notes]
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        out.print(f"{label:<{width}}  {text}", markup=False)
    if tensors:
        for row in found.tensors:
            shape = "x".join(map(str, row.shape)) or "scalar"
            out.print(f"  {row.name}  {row.dtype} {shape}  {row.role}", markup=False)
