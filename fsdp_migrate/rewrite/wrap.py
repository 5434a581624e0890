"""
One `FSDP(...)` call on its way to `fully_shard`, and what its arguments turn into.

Every FSDP1 argument is some rule's business (rules/argument_*.py). That rule either adds what it
becomes to a `Translation` or raises `Undecided`; then the whole call is left as it is. Texts are
made late, when edits are applied, so that nothing is imported for a call that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from fsdp_migrate.rewrite.file import File
from fsdp_migrate.rewrite.options import State
from fsdp_migrate.rewrite.units import Units

Make = Callable[[], str]
Step = Callable[[str], str]  # given the text of the model, the source of statements

# FullyShardedDataParallel's signature, in order.
PARAMETERS = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)


class Undecided(Exception):
    """What a rule would need to know; its text goes into the marker."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument, wherever it is written: in the call or in a dict of keyword arguments."""

    name: str
    value: cst.BaseExpression
    node: cst.CSTNode  # what the report points at

    @property
    def api(self) -> str:
        return f"FullyShardedDataParallel({self.name}=)"


@dataclass(slots=True)
class Outcome:
    argument: Argument
    rule: str
    state: State
    message: str


@dataclass(slots=True)
class Translation:
    """
    What a set of FSDP1 arguments becomes: keywords of fully_shard (None: a `**` expression),
    keywords for the units or the root alone, statements before and after sharding, and the units.
    """

    file: File
    at: cst.CSTNode  # where the texts will stand
    keywords: list[tuple[str | None, Make]] = field(default_factory=list)
    unit_keywords: list[tuple[str | None, Make]] = field(default_factory=list)
    root_keywords: list[tuple[str | None, Make]] = field(default_factory=list)
    setup: list[Make] = field(default_factory=list)  # statements that do not know the model
    before: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    units: Units | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    arguments: dict[str, Argument] = field(default_factory=dict)
    synced: bool = False  # the first steps before and after give every rank rank 0's weights
    init: Make | None = None  # param_init_fn that is run unit by unit
    mesh: Make | None = None
    helper: str | None = None  # shards in place of fully_shard: the units are among the keywords
    strategy: Callable[[Make | None], str] | None = None  # of a strategy only known by name

    @property
    def only_synced(self) -> bool:
        """Whether nothing has to happen around the sharding but the copying from rank 0."""
        return self.synced and len(self.before) == len(self.after) == 1 and self.init is None

    def all_keywords(self) -> list[tuple[str | None, Make]]:
        """The keywords, the mesh among them or given to the helper for strategies."""
        keywords = list(self.keywords)
        strategy, mesh = self.strategy, self.mesh
        if strategy is not None:
            keywords.insert(0, (None, lambda: strategy(mesh)))
        elif mesh is not None:
            keywords.insert(0, ("mesh", mesh))
        return keywords

    def value(self, name: str) -> cst.BaseExpression | None:
        """The value of a sibling argument."""
        found = self.arguments.get(name)
        return found.value if found else None


def call_arguments(call: cst.Call, first: int = 0) -> Iterator[Argument]:
    """The arguments of an FSDP call by name; `**` ones have the name "**"."""
    position = first
    for arg in call.args:
        if arg.star == "*":
            raise Undecided("which arguments `*` stands for cannot be seen here")
        if arg.star == "**":
            yield Argument("**", arg.value, arg)
        elif arg.keyword is not None:
            yield Argument(arg.keyword.value, arg.value, arg)
        else:
            if position >= len(PARAMETERS):
                raise Undecided("more positional arguments than FSDP has")
            yield Argument(PARAMETERS[position], arg.value, arg)
            position += 1


def keyword_texts(keywords: list[tuple[str | None, Make]]) -> list[str]:
    return [f"{name}={make()}" if name else f"**{make()}" for name, make in keywords]
