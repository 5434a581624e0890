"""
Migration bugs, each planted as a small change of the correct FSDP2 script.

`says` is what the verdict must tell; `check` is the check that must find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CORRECT = Path(__file__).parent / "scripts" / "fsdp2.py"
LOOP = "        optimizer.step()\n"
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
BUILD = "    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)\n"
ROOT = "    fully_shard(model, **kwargs)\n"
RESUME = ("--resume", "CHECKPOINT")  # the test puts the file's path here
LOCAL_CLIP = """\
        grads = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([g.pow(2).sum() for g in grads]).sum().sqrt()
        for grad in grads:
            grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
"""


@dataclass(frozen=True)
class Bug:
    name: str
    changes: tuple[tuple[str, str], ...]
    check: str
    says: str
    args: tuple[str, ...] = ()
    bf16_only: bool = False
    rank: int | None = None
    tensor: str | None = None

    def plant(self, folder: Path) -> Path:
        """Write the variant beside a copy of the model; every change must apply."""
        text = CORRECT.read_text()
        for old, new in self.changes:
            assert old in text, (self.name, old)
            text = text.replace(old, new)
        folder.mkdir(parents=True, exist_ok=True)
        model = CORRECT.with_name("model.py")
        (folder / "model.py").write_text(model.read_text())
        script = folder / f"{self.name.replace(' ', '_')}.py"
        script.write_text(text)
        return script


def bug(name: str, old: str, new: str, check: str, says: str, **more: object) -> Bug:
    return Bug(name, ((old, new),), check, says, **more)  # type: ignore[arg-type]


BUGS = (
    bug("weight decay lost", "weight_decay=0.1", "weight_decay=0.0", "mechanism", "weight_decay"),
    bug("learning rate off", "lr=3e-3", "lr=3.03e-3", "mechanism", "lr of the optimizer is 0.003"),
    bug("betas changed", "lr=3e-3,", "lr=3e-3, betas=(0.9, 0.95),", "mechanism", "betas"),
    bug("eps changed", "lr=3e-3,", "lr=3e-3, eps=1e-7,", "mechanism", "eps"),
    bug("other optimizer", "optim.AdamW", "optim.Adam", "mechanism", "is AdamW before, Adam after"),
    bug("clip lost", CLIP, "", "step 0", "clipping is lost"),
    bug("clip to another norm", CLIP, CLIP.replace("0.5", "0.6"), "step 0", "gradient"),
    bug("clip by local norm", CLIP, LOCAL_CLIP, "step 0", "gradient norm at the optimizer"),
    bug(
        "gradients summed",
        CLIP,
        "        for p in model.parameters():\n            p.grad.mul_(world)\n" + CLIP,
        "step 0",
        "summed",
    ),
    bug(
        "loss times world size",
        "(loss / args.accumulate).backward()",
        "(loss * world / args.accumulate).backward()",
        "step 0",
        "loss",
    ),
    bug(
        "rank 0 data", "Data(seed=1000 + rank)", "Data(seed=1000)", "data", "rank 0's data", rank=1
    ),
    Bug(
        "optimizer before fully_shard",
        ((BUILD, ""), ("    for module in reversed", BUILD + "    for module in reversed")),
        "mechanism",
        "built before fully_shard",
    ),
    Bug(
        "block not sharded",
        (
            ("isinstance(module, Block)", "isinstance(module, Block) and module is not skipped"),
            (
                "    for module in reversed",
                "    skipped = model.blocks[1]\n    for module in reversed",
            ),
            (
                ROOT,
                "    fully_shard(model, ignored_params=set(skipped.parameters()), **kwargs)\n",
            ),
        ),
        "mechanism",
        "blocks.1",
    ),
    bug(
        "tie lost",
        "    model = Decoder()\n",
        "    model = Decoder()\n"
        "    model.head.weight = torch.nn.Parameter(model.emb.weight.detach().clone())\n",
        "mechanism",
        "tie is lost",
    ),
    bug(
        "other initialisation",
        "    model = Decoder()\n",
        "    model = Decoder()\n    torch.nn.init.normal_(model.blocks[1].up.weight, std=0.2)\n",
        "start",
        "blocks.1.up.weight",
        tensor="blocks.1.up.weight",
    ),
    bug(
        "dropout seed",
        "torch.manual_seed(100 + rank)",
        "torch.manual_seed(100)",
        "step 0",
        "random state",
        rank=1,
    ),
    bug(
        "parameter dtype",
        "param_dtype=torch.bfloat16",
        "param_dtype=torch.float16",
        "mechanism",
        "parameters are computed in bfloat16 before, float16 after",
        bf16_only=True,
    ),
    bug(
        "reduce dtype",
        "reduce_dtype=torch.bfloat16",
        "reduce_dtype=torch.float32",
        "mechanism",
        "gradients are reduced in bfloat16 before, float32 after",
        bf16_only=True,
    ),
    bug(
        "frozen layer trained",
        "model.emb.requires_grad_(False)",
        "pass",
        "start",
        "emb.weight is frozen before, trained after",
        args=("--freeze",),
        tensor="emb.weight",
    ),
    bug(
        "sync at the first micro-batch",
        "micro == args.accumulate - 1",
        "micro == 0",
        "step 0",
        "gradient norm after backward",
        args=("--accumulate", "3"),
    ),
    bug(
        "never synchronised",
        "model.set_requires_gradient_sync(micro == args.accumulate - 1)",
        "model.set_requires_gradient_sync(False)",
        "step 0",
        "has a gradient",
        args=("--accumulate", "3"),
    ),
    bug(
        "loss not divided",
        "(loss / args.accumulate)",
        "loss",
        "step 0",
        "loss",
        args=("--accumulate", "3"),
    ),
    bug(
        "buffers not broadcast",
        "[*model.parameters(), *model.buffers()]",
        "model.parameters()",
        "start",
        "not broadcast",
        args=("--uneven",),
        rank=1,
        tensor="bias",
    ),
    bug(
        "parameters not broadcast",
        "[*model.parameters(), *model.buffers()]",
        "model.buffers()",
        "start",
        "norm.bias",
        args=("--uneven",),
        tensor="norm.bias",
    ),
    bug(
        "aliased step counters",
        'state["step"] = state["step"].clone()',
        "pass",
        "start",
        "is one tensor in the second run",
        args=RESUME,
    ),
    bug(
        "momentum not resumed",
        "        scheduler.load_state_dict",
        '        [s["exp_avg"].zero_() for s in optimizer.state.values()]\n'
        "        scheduler.load_state_dict",
        "start",
        "exp_avg of",
        args=RESUME,
    ),
    bug(
        "momentum missing",
        "        scheduler.load_state_dict",
        '        [s.pop("exp_avg") for s in optimizer.state.values()]\n'
        "        scheduler.load_state_dict",
        "start",
        "is there in the first run only",
        args=RESUME,
    ),
    bug(
        "optimizer not resumed",
        '        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)\n',
        "",
        "mechanism",
        "lr of the optimizer",
        args=RESUME,
    ),
    bug(
        "scheduler not resumed",
        '        scheduler.load_state_dict(saved["scheduler"])\n',
        "",
        "start",
        "the learning rate at step 1",
        args=RESUME,
    ),
)
