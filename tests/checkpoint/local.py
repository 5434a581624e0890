"""LOCAL_STATE_DICT fixtures as `flat.unflatten` wants them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fsdp_migrate.checkpoint.contents import Contents
from fsdp_migrate.checkpoint.flat import FLAT_KEYS, Unflattened, flats_of, unflatten
from fsdp_migrate.checkpoint.flat_layout import Evidence, writer_of
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.meta_model import from_module
from fsdp_migrate.checkpoint.model_layout import ModelLayout
from fsdp_migrate.checkpoint.names import clean
from fsdp_migrate.checkpoint.readers import dcp, ranks
from fsdp_migrate.checkpoint.sorting import model_values
from fsdp_migrate.checkpoint.tensors import Tensor
from tests.checkpoint.cases import Case
from tests.checkpoint.tiny_model import Tiny, param_groups


def layout_of(settings: Mapping[str, Any]) -> ModelLayout:
    """The layout of the model that a case was trained with."""
    with torch.device("meta"):
        model = Tiny(
            tied=bool(settings.get("tied")),
            gate=bool(settings.get("scalar") or settings.get("ignored")),
            noncontig=bool(settings.get("noncontig")),
            frozen=settings.get("frozen"),
        )
    optimizer = torch.optim.SGD(param_groups(model)) if settings.get("groups") else None
    return from_module(model, optimizer, "the test's model")


def read_local(case: Case, part: str = "local_rank") -> tuple[dict[str, Tensor], Contents]:
    """The model's tensors by clean name, and what else the reader found."""
    if part == "local_dcp":
        contents, root = dcp.read(case.path / part / "pytorch_model_fsdp_0"), ("model",)
    else:
        files = [path for path in (case.path / part).iterdir() if "model" in path.name]
        (found,) = ranks.rank_sets(files)
        contents, root = ranks.read(found), ()
    return {clean(name): value for name, value in model_values(contents, root).items()}, contents


def evidence_of(model: Mapping[str, Tensor], contents: Contents, case: Case) -> Evidence:
    loose = {n: t for n, t in model.items() if n.rpartition(".")[2] not in FLAT_KEYS}
    views = {
        clean(str(path[-1])).rpartition(".")[0]: {clean(n): at for n, at in found.items()}
        for path, found in contents.flat_views.items()
    }
    writer = writer_of(contents.writer)
    if case.settings.get("noncontig"):
        writer = writer_of(contents.writer, f"{case.torch[0]}.{case.torch[1]}")
    return Evidence(loose, views, contents.group_size, writer)


def unflattened(
    case: Case, layout: ModelLayout | None = None, part: str = "local_rank", **changes: Any
) -> Unflattened:
    model, contents = read_local(case, part)
    evidence = replace(evidence_of(model, contents, case), **changes)
    with Gatherer() as gatherer:
        return unflatten(
            flats_of(model), layout or layout_of(case.settings), evidence, gatherer.read
        )
