"""The plain optimizer, the global gradient norm and clipping, over DTensors of any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from steppe.runtime import collectives
from steppe.runtime.sharded import local, replicas
from steppe.training.config import TrainConfig

_PIECE = 1 << 20  # elements that are widened to float64 at a time


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors don't."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim > 1 and not name.endswith("bias")]
    spared = [p for name, p in named if p.ndim <= 1 or name.endswith("bias")]
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def plain_adamw(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """torch's foreach AdamW: the plain program's optimizer, with its state made at once.

    Peak: both moments in the parameters' type, plus foreach's temporaries at the update.
    """
    optimizer = torch.optim.AdamW(
        parameter_groups(model, train.weight_decay), lr=train.lr, betas=train.betas, eps=train.eps, foreach=True
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def gradient_norm(parameters: Iterable[nn.Parameter], group: collectives.Group) -> torch.Tensor:
    """The global two-norm of all gradients, a float64 scalar, the same on all ranks.

    Peak: 8 bytes x 1M elements of transient. Exactness: reordered over the squares, summed in float64.
    """
    squares = [_square_sum(p.grad) for p in parameters if p.grad is not None]
    device = squares[0].device if squares else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    return collectives.all_reduce(total, group).sqrt()


def clip_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, largest: float) -> None:
    """Scale all gradients in place so that their norm is at most `largest`; nothing is touched below it."""
    factor = float(largest / norm) if norm > largest else 1.0
    if factor < 1.0:
        torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)


def _square_sum(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares that this rank answers for: replicas share theirs out."""
    own = local(gradient).detach()
    total = own.new_zeros((), dtype=torch.float64)
    for piece in _pieces(own):
        wide = piece.double()
        total += torch.dot(wide, wide)
    return total / replicas(gradient, collectives.world())


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE]
