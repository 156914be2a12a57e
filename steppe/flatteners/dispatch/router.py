"""The router's own two needs: its auxiliary loss from counts, and the bias of auxiliary-loss-free routing.

The loss is E * sum_e (routes of e / rows) * (probability of e / rows), rows counted over layers and ranks. The counts
have no gradient, so what every rank differentiates is its own share of a weighted sum of probabilities, and nothing of
size [N, k, E] exists; probabilities are made again in the backward, tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from steppe.core.errors import ShapeError
from steppe.flatteners.dispatch.plan import Ints
from steppe.runtime import collectives, scopes

_TILE_ELEMENTS = 2**18


def auxiliary_loss(
    router_logits: Sequence[torch.Tensor],
    top_k: int,
    *,
    attention_mask: torch.Tensor | None = None,
    group: collectives.Group = None,
) -> torch.Tensor:
    """This rank's share of the load-balancing loss of logits [N,E], layer by layer; shares sum up to the global loss.

    `attention_mask` (any shape of N elements) leaves padding tokens out. With one rank it is the whole loss and equals
    transformers' `load_balancing_loss_func`.

    Peak: one tile of 1 MiB and two vectors of E a layer.
    Exactness: reordered over tokens, layers and ranks.
    Raises: ShapeError where a layer's logits don't fit the others or the mask.
    Source: arXiv 2101.03961, equations 4 to 6.
    """
    with scopes.label("router"):
        mask = _flat_mask(router_logits, attention_mask)
        totals = _totals(router_logits, top_k, mask)
        collectives.all_reduce(totals, group)
        counts, rows = totals[:-1], totals[-1].clamp(min=1)
        return _weighted(router_logits, counts * (counts.numel() / rows / rows), mask)


def batch_loss(
    router_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None, *,
    groups: Sequence[collectives.Group] = (), as_share: bool = False,
) -> torch.Tensor | int:  # fmt: skip
    """What transformers' `load_balancing_loss_func` is called for, with the frequencies of all ranks.

    E * sum_e (frequency of e over `groups`) * (mean probability of e over this rank's tokens): the mean over ranks,
    weighted by their tokens, is the loss of the whole batch, and so are the gradients. On one rank it is theirs.
    `groups`: process groups whose product holds the ranks of a batch. Masks that are no tensor are for attention only.
    `as_share`: this rank's share instead, weighted by its tokens already: the sum over ranks is the whole batch's.

    Peak, Raises: as `auxiliary_loss`. Exactness: reordered over tokens, layers and ranks.
    Source: arXiv 2501.11873 (global-batch load balancing).
    """
    if not isinstance(router_logits, tuple) or not router_logits:
        return 0
    with scopes.label("router"):
        mask = _flat_mask(router_logits, attention_mask if isinstance(attention_mask, torch.Tensor) else None)
        totals = _totals(router_logits, top_k, mask)
        own = totals[-1].clamp(min=1)
        for group in groups:
            collectives.all_reduce(totals, group)
        counts, rows = totals[:-1], totals[-1].clamp(min=1)
        return _weighted(router_logits, counts * (counts.numel() / rows / (rows if as_share else own)), mask)


def _flat_mask(router_logits: Sequence[torch.Tensor], attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """[N] in float32. Raises: ShapeError."""
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(router_logits[0].device, torch.float32)
    _check(router_logits, mask)
    return mask


def _weighted(router_logits: Sequence[torch.Tensor], weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """sum over layers and tokens of softmax(logits) . weight [E], in float32 at least."""
    weight = weight.to(torch.promote_types(router_logits[0].dtype, torch.float32))
    return torch.stack([_Share.apply(logits, weight, mask) for logits in router_logits]).sum()


def updated_bias(bias: torch.Tensor, counts: Ints, rate: float) -> torch.Tensor:
    """The next bias of auxiliary-loss-free routing: +rate for experts below the mean count, -rate above.

    Source: arXiv 2408.15664, algorithm 1.
    """
    load = torch.from_numpy(counts).to(bias.device)
    return bias + rate * torch.sign(load.sum() - load * len(counts)).to(bias.dtype)


def _check(router_logits: Sequence[torch.Tensor], mask: torch.Tensor | None) -> None:
    wanted = (router_logits[0].shape[0] if mask is None else mask.numel(), router_logits[0].shape[1])
    for logits in router_logits:
        if tuple(logits.shape) != wanted:
            raise ShapeError(
                "router logits", got=tuple(logits.shape), allowed=wanted, remedy="pass every layer's [N,E] and its mask"
            )


def _totals(router_logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None) -> torch.Tensor:
    """[E + 1] float64: routes of each expert over all layers, and rows."""
    num_experts = router_logits[0].shape[1]
    totals = torch.zeros(num_experts + 1, dtype=torch.float64, device=router_logits[0].device)
    for logits in router_logits:
        ids = logits.detach().topk(top_k, dim=-1).indices
        ones = torch.ones((), dtype=torch.float64, device=ids.device) if mask is None else mask.double()[:, None]
        totals.index_add_(0, ids.reshape(-1), ones.expand(ids.shape).reshape(-1))
        totals[-1] += len(logits) if mask is None else mask.sum(dtype=torch.float64)
    return totals


class _Share(torch.autograd.Function):
    """sum over tokens of softmax(logits) . weight, probabilities kept for one tile only."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(logits, weight, mask)
        share = torch.zeros((), dtype=torch.float64, device=logits.device)
        for rows in _tiles(logits):
            per_token = torch.softmax(logits[rows].to(weight.dtype), -1) @ weight
            share += (per_token if mask is None else per_token * mask[rows]).sum(dtype=torch.float64)
        return share.to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, weight, mask = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _tiles(logits):
            p = torch.softmax(logits[rows].to(weight.dtype), -1)
            inner = weight - (p @ weight)[:, None]
            scale = grad if mask is None else grad * mask[rows, None]
            out[rows] = p.mul_(inner).mul_(scale)
        return out, None, None


def _tiles(logits: torch.Tensor) -> list[slice]:
    step = max(1, _TILE_ELEMENTS // logits.shape[1])
    return [slice(a, min(a + step, len(logits))) for a in range(0, len(logits), step)]
