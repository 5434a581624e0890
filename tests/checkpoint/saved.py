"""
Every checkpoint of every case, by layout, and how what was read is held against the truth.

The truth was gathered while the runs were alive, without FSDP's state-dict code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_migrate.checkpoint.index import Index
from fsdp_migrate.checkpoint.load import LoadOptions
from fsdp_migrate.checkpoint.tensors import Tensor
from tests.checkpoint import factories
from tests.checkpoint.cases import Case, cases, equal, values
from tests.checkpoint.tiny_model import Tiny

NOT_SAVED = {"model.rotary_emb.cached"}  # a buffer that is not persistent
FULL_OPTIMIZERS = ("optimizer.bin", "full_optim_state_dict.pt", "full_optim_rekeyed_param_id.pt")


@dataclass(frozen=True)
class Saved:
    """
    One checkpoint: `kind` is its layout; `optimizer` is given where it lies apart, or where the
    folder holds the same one in several forms.
    """

    case: Case
    kind: str
    source: Path
    optimizer: Path | None = None

    @property
    def id(self) -> str:
        form = f"-{self.optimizer.stem}" if self.optimizer else ""
        return f"{self.case.id}-{self.kind}{form}"

    @property
    def flat(self) -> bool:
        """Whether it holds flat parameters, which need the model's layout."""
        return self.kind.startswith("local")

    @property
    def raw(self) -> bool:
        """Whether its optimizer's states are numbered, as optimizer.state_dict() numbers them."""
        if self.case.settings.get("fsdp2"):
            return self.kind in ("ranks", "dcp_plain")
        rekeyed = self.optimizer is not None and "rekeyed" in self.optimizer.name
        return rekeyed or self.kind == "nested-ranks" or self.kind.endswith("raw")

    @property
    def lost(self) -> bool:
        """torch 1.13 pickled nested state dicts through DCP as one object of rank 0."""
        return self.case.torch < (2, 0) and self.kind in ("dcp", "nested_dcp", "local_dcp")

    @property
    def has_model(self) -> bool:
        return self.kind != "ranks-optimizer"

    @property
    def has_optimizer(self) -> bool:
        if self.kind == "local_rank":
            return any(self.source.glob("optimizer*"))
        if self.kind == "full":
            return self.optimizer is not None
        return self.kind not in ("dcp_toplevel", "local_dcp", "ranks-model")

    @property
    def model(self) -> str | None:
        """The model that a layout is asked of, where one is needed."""
        if not (self.flat or self.raw):
            return None
        settings = self.case.settings
        frozen = {None: None, "layer0": "frozen_block"}.get(settings.get("frozen"), "frozen")
        switch = "gate" if settings.get("scalar") or settings.get("ignored") else None
        named = (name for name in ("tied", "noncontig", "groups") if settings.get(name))
        return f"tests.checkpoint.factories:{next(named, None) or switch or frozen or 'plain'}"

    @property
    def source_torch(self) -> str | None:
        """The files alone cannot tell the torch versions before and after 2.6 apart."""
        major, minor = self.case.torch
        return f"{major}.{minor}" if self.flat and self.case.settings.get("noncontig") else None

    def options(self) -> LoadOptions:
        return LoadOptions(
            optimizer_from=self.optimizer, model=self.model, source_torch=self.source_torch
        )

    def arguments(self) -> list[object]:
        given = {
            "--optimizer": self.optimizer,
            "--model": self.model,
            "--source-torch": self.source_torch,
        }
        return [word for pair in given.items() if pair[1] is not None for word in pair]


def every_saved() -> Iterator[Saved]:
    return (saved for case in cases() for saved in saved_by(case))


def saved_by(case: Case) -> Iterator[Saved]:
    for part in sorted(path for path in case.path.iterdir() if path.is_dir()):
        yield from _of(case, part)


def _of(case: Case, part: Path) -> Iterator[Saved]:
    match part.name:
        case "full":
            model = part / "pytorch_model_fsdp.bin"
            if not any((part / name).exists() for name in FULL_OPTIMIZERS):
                yield Saved(case, "full", model)
            for name in FULL_OPTIMIZERS:
                if (part / name).exists():
                    yield Saved(case, "full", model, part / name)
        case "sharded_rank":
            found = {path.name.partition("_")[0] for path in part.iterdir()}
            if found >= {"model", "optim"}:
                yield Saved(case, "ranks", part)
            elif found & {"model", "optim"}:
                yield Saved(case, f"ranks-{'model' if 'model' in found else 'optimizer'}", part)
        case "sharded_dcp_old" | "sharded_dcp_new" | "dcp_get_state_dict" | "dcp_plain":
            yield Saved(case, "dcp" if part.name.startswith("sharded") else part.name, part)
        case "sharded_dcp_toplevel" | "nested_dcp" | "local_dcp":
            yield Saved(case, part.name.removeprefix("sharded_"), part)
        case "nested":
            yield Saved(case, "nested", part / "checkpoint.pt")
            yield Saved(case, "nested-ranks", part / "checkpoint_rank0.pt")
        case "local_rank":
            yield Saved(case, "local_rank", part)
        case "raw_optim":
            yield from _with_raw(case, part)


def _with_raw(case: Case, optimizer: Path) -> Iterator[Saved]:
    """A raw optimizer beside each kind of model that the same run saved."""
    local = case.path / "local_rank"
    if local.exists():
        files = list(local.glob("*model*"))
        kind = "local+raw" if len(files) == len(list(optimizer.iterdir())) else ""
        if kind:
            yield Saved(case, kind, files[0], optimizer)
    elif (full := case.path / "full" / "pytorch_model_fsdp.bin").exists():
        yield Saved(case, "full+raw", full, optimizer)


def truth_model(case: Case) -> dict[str, list[torch.Tensor]]:
    """What each entry of the model may be: buffers may be any rank's, and are never summed."""
    truth = case.truth
    found = {name: [value] for name, value in truth["params"].items()}
    for alias, first in truth["shared"].items():
        found[alias] = found[first]
    for name in truth["buffers"]:
        if name not in NOT_SAVED:
            found[name] = [rank[name] for rank in truth["buffers_by_rank"]]
    return found


def check_model(case: Case, model: Mapping[str, torch.Tensor]) -> None:
    truth = truth_model(case)
    assert set(model) == set(truth)
    wrong = [n for n, value in model.items() if not any(equal(value, t) for t in truth[n])]
    assert wrong == []


def check_state(case: Case, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Exactly the states there were; `step` a 0-dim float32 tensor as optimizers keep it."""
    truth = {
        name: {
            key: value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
            for key, value in entries.items()
        }
        for name, entries in case.truth["optim"].items()
    }
    assert {n: set(entries) for n, entries in state.items()} == {
        n: set(entries) for n, entries in truth.items()
    }
    wrong = [
        (name, key)
        for name, entries in state.items()
        for key, value in entries.items()
        if not equal(value, truth[name][key])
    ]
    assert wrong == []


def check_groups(case: Case, groups: list[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
    """The groups' options, their split, and that the groups list each parameter with a state."""
    truth = case.truth["param_groups"]
    assert len(groups) == len(truth)
    for group, expected in zip(groups, truth, strict=True):
        for key, value in expected.items():
            found = group[key]
            same = list(found) == list(value) if isinstance(value, tuple) else found == value
            assert same, (key, found, value)
    listed = [name for group in groups for name in group["params"]]
    assert len(listed) == len(set(listed)) and set(state) <= set(listed)
    if case.settings.get("groups"):
        plain = {n for n in listed if n.endswith("bias") or "norm" in n}
        assert set(groups[1]["params"]) == plain


def trained_names(case: Case) -> list[str]:
    """What a plain model's optimizer numbers: the parameters it was given, in that order."""
    if case.settings.get("groups"):
        model, optimizer = factories.groups()
        names = {id(p): name for name, p in model.named_parameters()}
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    model = Tiny(tied=bool(case.settings.get("tied")), gate=True, noncontig=True)
    return [name for name, _ in model.named_parameters() if name in case.truth["optim"]]


def check_index(case: Case, index: Index) -> None:
    """An Index, its values read from the source files."""
    if index.model:
        check_model(case, {name: values(tensor) for name, tensor in index.model.items()})
    if index.optimizer is None:
        return
    state = {
        name: {key: _value(value) for key, value in entries.items()}
        for name, entries in index.optimizer.state.items()
    }
    check_state(case, state)
    groups = [{**g.options, "params": list(g.params)} for g in index.optimizer.groups]
    check_groups(case, groups, state)


def _value(value: object) -> object:
    return values(value) if isinstance(value, Tensor) else torch.tensor(float(value))
