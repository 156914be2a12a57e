"""Small programs that the boundary tests run plain and with SCO."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from steppe import SCO, BoundaryPolicy
from steppe.flatteners.boundary.reference import checkpointed
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane
from tests.support.exactness import assert_bitwise

ALL = BoundaryPolicy(min_bytes=0)
CPU = torch.device("cpu")


def rough_sco(policy: BoundaryPolicy = ALL, *, seed: int = 0, most_s: float = 0.02) -> SCO:
    """SCO whose lanes sleep 0..20 ms before each copy and whose host blocks are NaN before and after use."""
    draw = random.Random(seed)
    lanes = tuple(open_lane(name, CPU, delay=lambda: draw.uniform(0, most_s)) for name in ("out", "in"))
    return SCO(policy, lanes=lanes, arena=Arena("boundary", policy.host_bytes, poison=True))


class Block(nn.Module):
    """Norm, two products, dropout, residual: [N,H] to [N,H]."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(hidden)))))


class Pair(Block):
    """A block of two streams: a tuple in, a tuple out, the hidden state by keyword."""

    def forward(self, *, hidden: torch.Tensor, streams: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, torch.Tensor]:
        residual, scale = streams
        out = super().forward(hidden)
        return out * scale, residual + out


class Stack(nn.Module):
    """A plain model: L blocks and a scalar loss."""

    def __init__(self, num_layers: int = 5, hidden: int = 16, dropout: float = 0.0, kind: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(hidden, dropout) for _ in range(num_layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = hidden
        for layer in self.layers:
            if isinstance(layer, Pair):
                hidden, residual = layer(hidden=hidden, streams=(residual, 1))
            else:
                hidden = layer(hidden)
        return (hidden + residual).float().square().mean()


class Language(nn.Module):
    """A Hugging Face toy as a function of token ids."""

    def __init__(self, family: str = "qwen3_moe", **changes: object) -> None:
        super().__init__()
        from tests.support.float64 import toy_model

        changes = {"num_hidden_layers": 4, **changes}
        self.model = toy_model(family, **changes)
        self.model.config._experts_implementation = "eager"
        self.model.train()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plainly(model: nn.Module) -> Callable[[], object]:
    """Join torch's own checkpoint to a model; returns the undo."""
    if isinstance(model, Language):
        model.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpointed)
        model.model.enable_input_require_grads()
        return lambda: model.model._set_gradient_checkpointing(enable=False)
    for layer in model.layers:
        layer.forward = _bound(checkpointed, layer.forward)
    return lambda: [vars(layer).pop("forward") for layer in model.layers]


def with_sco(model: nn.Module, sco: SCO) -> Callable[[], object]:
    sco.apply(model.model if isinstance(model, Language) else model)
    return sco.detach


def _bound(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, **kwargs)


def inputs_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    if isinstance(model, Language):
        return torch.randint(0, 256, (2, 24), generator=draw)
    dtype = next(model.parameters()).dtype
    return torch.randn(24, model.layers[0].norm.normalized_shape[0], generator=draw).to(dtype)


def gradients(model: nn.Module, *, seeds: Sequence[int] = (1,), autocast: bool = False) -> dict[str, torch.Tensor]:
    """Losses, and parameter gradients summed over one forward and backward a seed."""
    model.zero_grad(set_to_none=True)
    results: dict[str, torch.Tensor] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(inputs_of(model, seed))
        loss.backward()
        results[f"loss {seed}"] = loss.detach().clone()
    return results | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == plain.keys()
    assert len(plain) > 2
    for name, expected in plain.items():
        assert_bitwise(ours[name], expected, name)
