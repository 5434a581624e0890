"""
The model whose checkpoints are under fixtures/, by shape: nothing here can be run forward.

Written as layout tests need it: `build(...)` has the switches that the fixtures' cases have.
"""

import torch
from torch import nn

HIDDEN, VOCABULARY, INNER = 20, 37, 6


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, 8)
        self.k_proj = nn.Linear(HIDDEN, 4)
        self.v_proj = nn.Linear(HIDDEN, 4, bias=False)
        self.o_proj = nn.Linear(8, HIDDEN, bias=False)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = Norm()
        self.post_attention_layernorm = Norm()


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.zeros(4))
        self.register_buffer("cached", torch.zeros(2), persistent=False)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))


class Body(nn.Module):
    def __init__(self, gate: bool, noncontig: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = Norm()
        self.bn = nn.BatchNorm1d(HIDDEN)
        self.rotary_emb = Rope()
        self.odd = nn.Parameter(torch.zeros(7, 3))
        self.tiny = nn.Parameter(torch.zeros(2, 5))
        self.one = nn.Parameter(torch.zeros(1))
        self.conv = nn.Parameter(torch.zeros(5, 2, 3))
        if noncontig:
            self.nc = nn.Parameter(torch.zeros(6, 4).t())
        if gate:
            self.gate = Gate()


class Tiny(nn.Module):
    def __init__(
        self, tied: bool = False, gate: bool = False, noncontig: bool = False, frozen: object = None
    ) -> None:
        super().__init__()
        self.model = Body(gate, noncontig)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        if frozen == "layer0":
            self.model.layers[0].requires_grad_(False)
        elif frozen:
            for layer in self.model.layers:
                layer.self_attn.k_proj.weight.requires_grad_(False)
            self.model.odd.requires_grad_(False)


def param_groups(model: nn.Module) -> list[dict[str, object]]:
    """The fixtures' two groups: biases and norms without weight decay."""
    named = list(model.named_parameters())
    plain = [p for n, p in named if n.endswith("bias") or "norm" in n]
    ids = {id(p) for p in plain}
    return [{"params": [p for _, p in named if id(p) not in ids]}, {"params": plain}]
