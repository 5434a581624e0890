"""
Lightning's `FSDPStrategy`: FSDP1 behind an argument.

`ModelParallelStrategy` is the FSDP2 counterpart, and under it the user's module shards itself in
`configure_model`. Which classes to shard, and whether tensors are parallel too, only the user can
say: the call stays, with a marker and a sketch of that method above it.
"""

from __future__ import annotations

import ast

from fsdp_migrate.rewrite.configs.imports import qualified
from fsdp_migrate.rewrite.report import Site

RULE = "lightning-strategy"
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric")
STRATEGIES = ("FSDPStrategy", "DDPFullyShardedNativeStrategy")  # the latter up to 1.9
MESSAGE = (
    "FSDPStrategy is FSDP1: use ModelParallelStrategy(data_parallel_size=..., "
    "tensor_parallel_size=1) and shard in configure_model"
)
RESHARD = {"SHARD_GRAD_OP": "reshard_after_forward=False, "}


def sites(tree: ast.Module, names: dict[str, str], path: str) -> list[Site]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = qualified(node.func, names)
        library, last = name.partition(".")[0], name.rpartition(".")[2]
        if library not in LIBRARIES:
            continue
        asks = last in ("Trainer", "Fabric") and any(map(_is_fsdp, node.keywords))
        if last in STRATEGIES or asks:
            found.append(Site(path, node.lineno, last, "todo", RULE, MESSAGE))
    return found


def _is_fsdp(keyword: ast.keyword) -> bool:
    value = keyword.value
    named = isinstance(value, ast.Constant) and str(value.value).startswith("fsdp")
    return keyword.arg == "strategy" and named


def sketch(statement: ast.stmt) -> list[str]:
    """The lines of `configure_model`, as far as the strategy's own arguments say."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    arguments = {k.arg: k.value for call in calls for k in call.keywords if k.arg}
    mesh = 'mesh=self.device_mesh["data_parallel"]'
    extra = RESHARD.get(_last_word(arguments.get("sharding_strategy")), "")
    policy = arguments.get("auto_wrap_policy") or arguments.get("wrapping_policy")
    classes = "<block classes>"
    if isinstance(policy, ast.Set | ast.Tuple):
        classes = ast.unparse(ast.Tuple(policy.elts, ast.Load()))
    return [
        "def configure_model(self):",
        "    for module in reversed(list(self.modules())):",
        f"        if isinstance(module, {classes}):",
        f"            fully_shard(module, {extra}{mesh})",
        f"    fully_shard(self, {extra}{mesh})",
    ]


def _last_word(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value).upper()
    return node.attr if isinstance(node, ast.Attribute) else ""
