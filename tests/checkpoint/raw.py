"""Raw optimizer fixtures as `raw_optimizer.name` wants them."""

import json
from pathlib import Path
from typing import Any

import torch

from fsdp_migrate.checkpoint.contents import Contents, RankTree
from fsdp_migrate.checkpoint.flat_layout import writer_of
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.index import Index, Optimizer
from fsdp_migrate.checkpoint.model_layout import from_index
from fsdp_migrate.checkpoint.names import clean
from fsdp_migrate.checkpoint.raw_optimizer import Known, Named, name, wrap_prefixes
from fsdp_migrate.checkpoint.readers import ranks
from fsdp_migrate.checkpoint.sorting import model_values
from fsdp_migrate.checkpoint.tensors import Tensor
from fsdp_migrate.checkpoint.torch_file import read_torch_file
from tests.checkpoint.cases import Case, equal, values
from tests.checkpoint.local import layout_of


def trees(case: Case, part: str = "raw_optim", kind: str = "optim") -> list[RankTree]:
    files = [p for p in (case.path / part).iterdir() if p.name.startswith(kind)]
    (found,) = ranks.rank_sets(files)
    return [RankTree(rank, read_torch_file(path).tree) for rank, path in found.files]


def known_by_layout(case: Case) -> Known:
    """As beside LOCAL files: units from their flat keys, everything else from the user's model."""
    handles = json.loads((case.path / "flat_layout.json").read_text())["flat_params"]
    settings = case.settings
    ignored = frozenset({"model.gate.scale"} if settings.get("ignored") else ())
    return Known(
        layout=layout_of({**settings, "frozen": None}),
        prefixes=[handle["prefix"] for handle in handles],
        ignored=ignored,
        writer=writer_of("", f"{case.torch[0]}.{case.torch[1]}"),
    )


def known_by_model(case: Case) -> Known:
    """As in verl's folders: the model's own sharded files are all there is."""
    files = [p for p in (case.path / "sharded_rank").iterdir() if p.name.startswith("model")]
    (found,) = ranks.rank_sets(files)
    contents = ranks.read(found)
    return Known(
        layout=from_index(index_of(contents), "the model files"),
        prefixes=wrap_prefixes(contents.module_paths),
        group_size=contents.group_size,
        writer=writer_of(contents.writer),
        tensors=index_of(contents).model,
    )


def index_of(contents: Contents) -> Index:
    roles = {clean(str(path[-1])): role for path, role in contents.roles.items()}
    model = {clean(n): value for n, value in model_values(contents, ()).items()}
    return Index(model, roles=roles)


def named(found: list[RankTree], known: Known) -> Named:
    with Gatherer() as gatherer:
        return name(found, known, gatherer.read)


def wrong(optimizer: Optimizer, case: Case) -> list[str]:
    """Where the states are not those that the ranks held."""
    truth: dict[str, dict[str, Any]] = case.truth["optim"]
    found = []
    if set(optimizer.state) != set(truth):
        return sorted(set(optimizer.state) ^ set(truth))
    for fqn, entries in truth.items():
        states = optimizer.state[fqn]
        if set(states) != set(entries):
            found.append(f"{fqn}: {sorted(states)}")
            continue
        for key, expected in entries.items():
            state = states[key]
            assert isinstance(state, Tensor)
            value = values(state)
            if isinstance(expected, torch.Tensor):
                good = equal(value, expected)
            else:
                good = value.shape == () and value.item() == expected
            if not good:
                found.append(f"{fqn}.{key}")
    return found


def full_groups(case: Case) -> list[list[str]] | None:
    """The names in each param group, as FSDP's own FULL optimizer lists them."""
    path: Path = case.path / "full" / "optimizer.bin"
    if not path.exists():
        return None
    groups = torch.load(path, weights_only=True)["param_groups"]
    return [[clean(fqn) for fqn in group["params"]] for group in groups]
