"""The programs that OffloadStreamAdamW must equal: the bits in numpy, the truth in float64, the plain torch program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class Adam:
    """Hyper-parameters of one parameter."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False


@dataclass
class State:
    """One tensor's master and moments, in float32 (the bits) or float64 (the truth), and its own step count."""

    master: np.ndarray
    exp_avg: np.ndarray = field(init=False)
    exp_avg_sq: np.ndarray = field(init=False)
    t: int = 0

    def __post_init__(self) -> None:
        self.exp_avg, self.exp_avg_sq = np.zeros_like(self.master), np.zeros_like(self.master)


def state_of(parameter: torch.Tensor, dtype: type[np.floating]) -> State:
    """The state before the first step of a parameter."""
    return State(parameter.detach().to(torch.float64).cpu().contiguous().numpy().astype(dtype))


@np.errstate(all="ignore")
def step(state: State, gradient: torch.Tensor, adam: Adam, scale: float = 1.0) -> None:
    """One step, whole tensor at once, in the dtype of the state.

    The expression is AdamW's with sqrt(1 - b2^t) folded into rate and eps in double and with decay subtracted, which is
    the definition of the bits; in float64 neither is of any consequence.
    """
    kind = state.master.dtype.type
    state.t += 1
    (b1, b2), t = adam.betas, state.t
    root = math.sqrt(1 - b2**t)
    g = gradient.detach().to(torch.float64).cpu().contiguous().numpy().astype(kind)
    g = g * kind(-scale if adam.maximize else scale)
    state.exp_avg = state.exp_avg + kind(1 - b1) * (g - state.exp_avg)
    state.exp_avg_sq = state.exp_avg_sq * kind(b2) + (kind(1 - b2) * g) * g
    moved = kind(-adam.lr * root / (1 - b1**t)) * state.exp_avg / (np.sqrt(state.exp_avg_sq) + kind(adam.eps * root))
    state.master = state.master + (moved - kind(adam.lr * adam.weight_decay) * state.master)


def written(state: State, parameter: torch.Tensor) -> torch.Tensor:
    """What the parameter holds after the step: the master, rounded to its dtype by torch."""
    return torch.from_numpy(np.array(state.master)).to(parameter.dtype)


def grad_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The global norm in exactly rounded float64."""
    squares = (float(x) ** 2 for g in gradients for x in g.detach().double().flatten().tolist())
    return math.sqrt(math.fsum(squares))


class SerialOffload:
    """The plain offload, one stage after the other: gradients to float32 on the host, torch.optim.AdamW on float32
    masters, masters cast back into the parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, fused: bool = False, **settings: object) -> None:
        self.parameters = list(parameters)
        self.masters = [torch.nn.Parameter(p.detach().cpu().float().clone()) for p in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, fused=fused, **settings)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> None:
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = None if parameter.grad is None else parameter.grad.cpu().float()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.adamw.step()
        for master, parameter in zip(self.masters, self.parameters):
            parameter.copy_(master)
