"""The elementwise middle of an expert, gate and up columns in, activation out, forward and backward.

Everything here runs in float32 (float64 for float64 rows) on a tile of rows: with bf16 elementwise math the error of
the gradients exceeds the plain program's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

from steppe.core.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Pair = tuple[torch.Tensor, torch.Tensor]
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Gate(Protocol):
    """act = gate(g, u), elementwise over [rows, I]."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...

    def backward(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> GateGrads:
        """From `grad` [rows,I] of weight * act, and `weight` [rows,1]."""


@dataclass(frozen=True)
class GateGrads:
    """What a tile's backward gives: weight * act again, gradients of gate and up, and of the route weight [rows]."""

    weighted: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class SiluGate:
    """silu(gate) * up, backward written out."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate).mul_(up)

    def backward(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> GateGrads:
        activated = F.silu(gate)
        act = activated * up
        route = torch.linalg.vecdot(grad, act)
        grad = grad * weight
        d_up = activated.mul_(grad)
        return GateGrads(act.mul_(weight), torch.ops.aten.silu_backward(grad.mul_(up), gate), d_up, route)


@dataclass(frozen=True)
class AnyGate:
    """Any elementwise function of (gate, up); its backward is autograd's, on the tile alone."""

    function: Function

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.function(gate, up)

    def backward(self, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> GateGrads:
        with torch.enable_grad():
            leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
            act = self.function(*leaves)
            given = (None, None)  # of a function that looks at neither
            if act.requires_grad:
                given = torch.autograd.grad(act, leaves, grad * weight, allow_unused=True)
        act = act.detach()
        d_gate, d_up = (torch.zeros_like(gate) if d is None else d for d in given)
        return GateGrads(act * weight, d_gate, d_up, torch.linalg.vecdot(grad, act))


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gate_of(activation: Any) -> Gate:
    """The gate of a name or of a function of (gate, up). Raises: ConfigError for a name that is none."""
    if activation == "silu":
        return SiluGate()
    if callable(activation):
        return AnyGate(activation)
    if activation not in _PLAIN:
        raise ConfigError(
            "expert activation", got=repr(activation), allowed=f"silu, {', '.join(_PLAIN)} or a function of (gate, up)",
            remedy="pass the activation as a function of (gate, up)",
        )  # fmt: skip
    plain = _PLAIN[activation]
    return AnyGate(lambda gate, up: plain(gate) * up)


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Function:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate clamped from above, up from both sides."""

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return activation
