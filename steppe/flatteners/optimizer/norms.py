"""Global gradient norms in float64 that depend on neither buckets, threads nor the order of the parameters.

Each tensor is cut into fixed blocks, each block is summed in one fixed order, and the blocks' sums are added exactly
(fsum). Over ranks there is one all-reduce of one float64: a rank adds the squares of its own parts, divided by the
number of ranks that hold the same part, so that experts and dense parameters on different meshes count once each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from steppe.core.errors import SteppeError
from steppe.flatteners.optimizer.kernel import Kernel, load_kernel
from steppe.flatteners.optimizer.rows import check_gradient, flat_like
from steppe.flatteners.optimizer.schedule import clip_factor
from steppe.runtime import collectives, sharded

DEVICE_BLOCK = 2**22  # elements that an accelerator widens to float64 at a time
Squares = list[float] | torch.Tensor
Replicas = Callable[[torch.Tensor], int]


class NonFiniteGradients(SteppeError, RuntimeError):
    """The total norm of the gradients is infinite or not a number."""


def squares(gradient: torch.Tensor, kernel: Kernel) -> Squares:
    """Sums of squares of the blocks of a flat gradient: host floats, or float64 on its accelerator.

    Peak: 8 bytes x DEVICE_BLOCK on an accelerator, nothing on the host.
    """
    if gradient.device.type == "cpu":
        return kernel.squares(gradient)
    return torch.stack([_square_sum(block) for block in gradient.split(DEVICE_BLOCK)])


def _square_sum(block: torch.Tensor) -> torch.Tensor:
    wide = block.double()
    return torch.dot(wide, wide)


def total_norm(parts: Iterable[tuple[Squares, int]], group: collectives.Group, device: torch.device) -> float:
    """The root of all squares of all ranks; each part comes with the number of ranks that hold the same.

    Exactness: the same bits for any order of the parts on one rank; reordered over ranks.
    """
    by_replicas: dict[int, list[float]] = {}
    for part, replicas in _on_host(list(parts)):
        by_replicas.setdefault(replicas, []).extend(part)
    own = math.fsum(_exact_sum(values) / replicas for replicas, values in sorted(by_replicas.items()))
    if collectives.size(group) == 1:
        return math.sqrt(own)
    total = torch.tensor(own, dtype=torch.float64, device=device)
    return math.sqrt(float(collectives.all_reduce(total, group)))


def _exact_sum(values: Sequence[float]) -> float:
    """fsum, which refuses infinities of both signs; squares have one sign, NaN stays NaN."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _on_host(parts: list[tuple[Squares, int]]) -> Iterable[tuple[list[float], int]]:
    """Bring what accelerators summed to the host in one copy a device."""
    waiting = [part for part, _ in parts if isinstance(part, torch.Tensor)]
    if not waiting:
        return [(part, replicas) for part, replicas in parts if not isinstance(part, torch.Tensor)]
    values = iter(torch.cat([part.to(waiting[0].device) for part in waiting]).tolist())
    return [
        ([next(values) for _ in range(part.numel())] if isinstance(part, torch.Tensor) else part, replicas)
        for part, replicas in parts
    ]


def group_of(parameters: Iterable[torch.Tensor]) -> collectives.Group:
    """Over whom gradients are summed: the whole job if any parameter is shared out, this process alone if none is."""
    return collectives.world() if any(sharded.is_sharded(p) for p in parameters) else None


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, *, error_if_nonfinite: bool = False,
    replicas: Replicas | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale gradients in place so that their global norm is at most `max_norm`; give the norm (float64 scalar).

    Parameters may be plain tensors and DTensors of different meshes together: experts and dense parameters, replicas
    and tied weights count once each. Every rank calls this with the same parameters, with or without gradients.
    `replicas` says how many ranks hold the same part of a parameter, where placements alone don't tell.

    Peak: no tensor of the gradients' size.
    Exactness: float64 sums; reordered over ranks. Gradients are multiplied in their own dtype, as in torch.
    Raises: NonFiniteGradients with error_if_nonfinite, before any gradient is changed (without it they are scaled by
    the non-finite norm, as torch does); ShapeError for sparse gradients.
    """
    unique = dict.fromkeys([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    group = group_of(unique)
    held = [p for p in unique if p.grad is not None]
    gradients = [(p, sharded.local_as(p.grad, p)) for p in held]
    for parameter, gradient in gradients:
        check_gradient(gradient, sharded.local(parameter))
    count = replicas or (lambda parameter: sharded.replicas(parameter, group))
    kernel = load_kernel()
    parts = [(squares(flat_like(g, sharded.local(p)), kernel), count(p)) for p, g in gradients]
    device = next((sharded.local(p).device for p in unique), torch.device("cpu"))
    norm = total_norm(parts, group, device)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteGradients(f"the total norm of the gradients is {norm}; no gradient was changed")
    factor = clip_factor(norm, max_norm)
    if factor != 1.0:
        for p in held:
            sharded.local(p.grad).mul_(factor)
    return torch.tensor(norm, dtype=torch.float64, device=device)
