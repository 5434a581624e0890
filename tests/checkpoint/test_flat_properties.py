"""Un-flattening against real FullyShardedDataParallel layouts of random models, any world size."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from fsdp_migrate.checkpoint.flat import Unflattened, unflatten
from fsdp_migrate.checkpoint.flat_layout import Evidence, Writer
from fsdp_migrate.checkpoint.gather import Gatherer
from fsdp_migrate.checkpoint.meta_model import from_module
from fsdp_migrate.checkpoint.pickles import Stored
from fsdp_migrate.checkpoint.raw_optimizer import Known
from fsdp_migrate.checkpoint.tensors import Item, Tensor, row_major
from fsdp_migrate.errors import OpenQuestion, SourceError
from tests.checkpoint.cases import equal, values
from tests.checkpoint.fake_fsdp import Node, Refused, Saved, Setup, build, shard
from tests.checkpoint.raw import named

TODAY = Writer(oldest=(2, 7))
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
PARAMETERS = st.lists(st.tuples(SHAPES, st.booleans()), max_size=3).map(tuple)


def nodes(depth: int) -> st.SearchStrategy[Node]:
    if depth == 0:
        return st.builds(Node, PARAMETERS, ignored=st.sampled_from((False, False, False, True)))
    inner = st.lists(nodes(depth - 1), max_size=3).map(tuple)
    return st.builds(Node, PARAMETERS, inner, wrapped=st.booleans())


SETUPS = st.builds(
    Setup,
    nodes(2).map(lambda node: replace(node, wrapped=False)),
    world_size=st.integers(2, 9),
    orig=st.booleans(),
    bf16=st.booleans(),
    ties=st.integers(0, 2),
)


def sharded(setup: Setup, folder: Path) -> Saved:
    count = sum(p.numel() for m in build(setup).modules() if not m.node.ignored
                for p in m.parameters(recurse=False))  # fmt: skip
    assume(count)
    try:
        return shard(setup, folder)
    except Refused:
        reject()


def recovered(setup: Setup, saved: Saved, evidence: Evidence) -> Unflattened:
    with Gatherer() as gatherer:
        for loose in evidence.loose.values():
            for piece in loose.pieces:
                if isinstance(piece.store, Item):
                    where = piece.store.path
                    stored = Stored("float32", loose.shape, row_major(loose.shape), where, 0, "0")
                    gatherer._items[piece.store] = stored
        layout = from_module(build(setup), None, "the model")
        return unflatten(saved.flats, layout, evidence, gatherer.read)


def check(setup: Setup, saved: Saved, found: Unflattened) -> None:
    truth = dict(build(setup).named_parameters(remove_duplicate=False))
    kept = set(found.tensors) | (set(saved.whole) | set(saved.pieces)) - found.junk
    assert kept == set(truth)
    assert all(name in saved.whole for name in kept - set(found.tensors) if truth[name].numel())
    for name, tensor in found.tensors.items():
        assert equal(values(tensor), truth[name].detach()), name
    for unit in found.units:
        handle = saved.handles[unit.prefix]
        names = [clean_name(unit.prefix, fqn) for fqn in handle.flat_param._fqns]
        names = [name for name in names if truth[name].numel()]
        assert [p.parameter.name for p in unit.placements if p.parameter.numel] == names
        assert unit.numel == handle.flat_param._unpadded_unsharded_size.numel()


def clean_name(prefix: str, fqn: str) -> str:
    fqn = fqn.replace("_fsdp_wrapped_module.", "")
    return f"{prefix}.{fqn}" if prefix else fqn


@given(SETUPS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_rank_files_give_every_parameter(setup: Setup) -> None:
    """The bytes of every rank's shard, and the layout proved from them, are the model again."""
    with tempfile.TemporaryDirectory() as folder:
        saved = sharded(setup, Path(folder))
        evidence = Evidence(saved.whole, saved.views, setup.world_size, TODAY)
        check(setup, saved, recovered(setup, saved, evidence))


@given(SETUPS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_dcp_directory_gives_every_parameter_or_is_refused(setup: Setup) -> None:
    """Without views, local pieces of some rank stand beside the flat parameters as tensors."""
    with tempfile.TemporaryDirectory() as folder:
        saved = sharded(setup, Path(folder))
        whole = {name: _in_dcp(tensor) for name, tensor in saved.whole.items()}
        evidence = Evidence({**saved.pieces, **whole}, {}, None, TODAY)
        try:
            found = recovered(setup, saved, evidence)
        except (OpenQuestion, SourceError):
            # Only a 1-D ignored parameter, or one without elements, may be taken for a piece.
            assert setup.orig
            assert any(len(t.shape) == 1 for t in saved.whole.values())
            return
        check(setup, saved, found)


def _in_dcp(tensor: Tensor) -> Tensor:
    pieces = tuple(p._replace(store=Item(p.store, 0, 0, tensor.name)) for p in tensor.pieces)
    return Tensor(tensor.name, tensor.dtype, tensor.shape, pieces)


@given(SETUPS, st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_raw_optimizers_give_every_state_or_are_refused(setup: Setup, told: bool) -> None:
    """Each rank's own optimizer.state_dict(), where the states are copies of the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        saved = sharded(setup, Path(folder))
        known = Known(
            from_module(build(setup), None, "the model"),
            prefixes=list(saved.handles) if told else None,
            ignored=frozenset(saved.whole),
            writer=TODAY,
        )
        try:
            found = named(saved.optimizers, known)
        except OpenQuestion:
            assert not told
            return
        except SourceError:
            assert not told and not setup.orig
            return
        truth = dict(build(setup).named_parameters(remove_duplicate=False))
        for name, states in found.optimizer.state.items():
            assert equal(values(states["momentum_buffer"]), truth[name].detach()), name
            assert values(states["step"]).item() == 3
        held = {name for name in found.optimizer.state if truth[name].numel()}
        names = {id(p) for n, p in truth.items() if n in held}
        assert names == {id(p) for p in truth.values() if p.numel()}
        assert {n for g in found.optimizer.groups for n in g.params} >= held


@given(SETUPS, st.integers(0, 1000), st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_dealt_out_optimizers_give_right_states_or_are_refused(
    setup: Setup, seed: int, told: bool
) -> None:
    """Two param groups and frozen parameters, that nothing but sizes tells of."""
    setup = replace(setup, dealt=seed)
    with tempfile.TemporaryDirectory() as folder:
        saved = sharded(setup, Path(folder))
        known = Known(
            from_module(build(setup), None, "the model"),
            prefixes=list(saved.handles) if told else None,
            ignored=frozenset(saved.whole),
            writer=TODAY,
        )
        try:
            found = named(saved.optimizers, known)
        except OpenQuestion:
            return
        truth = dict(build(setup).named_parameters(remove_duplicate=False))
        for name, states in found.optimizer.state.items():
            assert equal(values(states["momentum_buffer"]), truth[name].detach()), name


def test_torch_pads_with_42() -> None:
    """The constant that the proof of alignment rests on."""
    from torch.distributed.fsdp import _flat_param

    assert _flat_param._FLAT_PARAM_PADDING_VALUE == 42
    assert torch.tensor(42.0).item() == 42.0
