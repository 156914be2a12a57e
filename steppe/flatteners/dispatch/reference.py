"""The programs that PipelinedLLEP is judged by, shortest first; autograd does their backward.

`dense_loop` is the truth. `plain_experts` is the strongest public form on one device, `plain_expert_parallel` over
ranks (one all-to-all, grouped GEMMs, everything saved); both under torch's checkpoint are the memory-saving baseline.
`whole_batch_llep` balances the same way without chunks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from steppe.flatteners.dispatch.plan import Plan, plan_experts
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.runtime import collectives

Group = collectives.Group
_NAMED = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def dense_loop(
    tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Expert after expert over its own tokens, all E experts in one process."""
    out = torch.zeros_like(tokens)
    for expert in range(experts.num_experts):
        token, choice = (expert_ids == expert).nonzero(as_tuple=True)
        rows = _one_expert(tokens[token], experts, expert)
        out = out.index_add(0, token, (rows * route_weights[token, choice, None]).to(out.dtype))
    return out


def plain_experts(
    tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """Sort routes by expert, grouped GEMMs over all of them, weight, sum over choices."""
    num_choices = expert_ids.shape[1]
    expert, order = expert_ids.reshape(-1).sort(stable=True)
    rows = _grouped_experts(tokens[order // num_choices], expert, experts)
    weighted = rows * route_weights.reshape(-1)[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return weighted[inverse].view(len(tokens), num_choices, -1).sum(1).to(tokens.dtype)


def plain_expert_parallel(
    tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, experts: ExpertWeights, group: Group
) -> torch.Tensor:
    """One all-to-all to the experts' ranks, grouped GEMMs, one all-to-all back, weight, sum over choices."""
    num_ranks, native = collectives.size(group), experts.num_experts
    num_choices = expert_ids.shape[1]
    expert, order = expert_ids.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert, minlength=num_ranks * native)
    everyone = collectives.all_gather(counts, group).view(num_ranks, num_ranks, native)
    mine = everyone[:, collectives.rank(group)]  # [source, local expert]
    sent, came = counts.view(num_ranks, -1).sum(1).tolist(), mine.sum(1).tolist()
    arrived = _Swap.apply(tokens[order // num_choices], came, sent, group)
    local = torch.arange(native, device=tokens.device).repeat(num_ranks).repeat_interleave(mine.reshape(-1))
    local, by_expert = local.sort(stable=True)
    grouped = _grouped_experts(arrived[by_expert], local, experts)
    results = torch.empty_like(grouped).index_copy(0, by_expert, grouped)
    home = _Swap.apply(results, sent, came, group)
    return _combine(home, order, route_weights, tokens)


def whole_batch_llep(
    tokens: torch.Tensor, expert_ids: torch.Tensor, route_weights: torch.Tensor, experts: ExpertWeights, group: Group
) -> torch.Tensor:
    """Least-loaded expert parallelism with one dispatch of the whole batch: balanced, nothing bounded."""
    num_ranks, rank, native = collectives.size(group), collectives.rank(group), experts.num_experts
    num_choices = expert_ids.shape[1]
    expert, order = expert_ids.reshape(-1).sort(stable=True)
    counts = torch.bincount(expert, minlength=num_ranks * native)
    everyone = collectives.all_gather(counts, group).numpy()
    plan = plan_experts(everyone)
    before = np.vstack([np.zeros_like(everyone[:1]), everyone.cumsum(0)])[:, plan.expert]
    inside = np.clip(before, plan.start, plan.stop)
    rows = np.diff(inside, axis=0)  # [source, piece]
    at = (counts.cumsum(0) - counts).numpy()[plan.expert] + np.maximum(inside[rank] - before[rank], 0)
    picked = np.concatenate([np.arange(a, a + n) for a, n in zip(at, rows[rank])])
    order = order[torch.from_numpy(picked)]
    sent = [int(rows[rank, plan.dest == r].sum()) for r in range(num_ranks)]
    came = rows[:, plan.dest == rank].sum(1).tolist()
    arrived = _Swap.apply(tokens[order // num_choices], came, sent, group)
    here = plan.dest == rank
    place = torch.arange(int(here.sum())).repeat(num_ranks)
    place, by_place = place.repeat_interleave(torch.from_numpy(rows[:, here].reshape(-1))).sort(stable=True)
    stack = _with_foreign(experts, plan, rank, group)
    grouped = _grouped_experts(arrived[by_place], place, stack)
    home = _Swap.apply(torch.empty_like(grouped).index_copy(0, by_place, grouped), sent, came, group)
    return _combine(home, order, route_weights, tokens)


def checkpointed(program: Any, *args: Any) -> torch.Tensor:
    """`program` under torch's non-reentrant checkpoint."""
    out: torch.Tensor = checkpoint(program, *args, use_reentrant=False)
    return out


def _one_expert(rows: torch.Tensor, experts: ExpertWeights, expert: int) -> torch.Tensor:
    first, second = experts.gate_up[expert], experts.down[expert]
    hidden = rows @ (first if experts.transposed else first.t())
    if experts.gate_up_bias is not None:
        hidden = hidden + experts.gate_up_bias[expert]
    out = _gate(hidden, experts) @ (second if experts.transposed else second.t())
    return out if experts.down_bias is None else out + experts.down_bias[expert]


def _gate(hidden: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    if experts.interleaved:
        gate, up = hidden[:, 0::2], hidden[:, 1::2]
    else:
        gate, up = hidden.chunk(2, dim=-1)
    if callable(experts.activation):
        return experts.activation(gate, up)
    return _NAMED[experts.activation](gate) * up


def _grouped_experts(rows: torch.Tensor, expert: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
    """Rows sorted by expert through their experts, one grouped GEMM per projection."""
    ends = torch.bincount(expert, minlength=experts.num_experts).cumsum(0).to(torch.int32)
    hidden = _grouped_mm(rows, experts.gate_up, ends, experts.transposed)
    if experts.gate_up_bias is not None:
        hidden = hidden + experts.gate_up_bias[expert]
    out = _grouped_mm(_gate(hidden, experts), experts.down, ends, experts.transposed)
    return out if experts.down_bias is None else out + experts.down_bias[expert]


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool) -> torch.Tensor:
    weight = weight if transposed else weight.transpose(1, 2)
    if rows.dtype != torch.float64 and weight.shape[1] * rows.element_size() % 16 == 0:
        return F.grouped_mm(rows, weight, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([rows[a:b] @ weight[e] for e, (a, b) in enumerate(pairwise(starts))])


def _combine(
    home: torch.Tensor, order: torch.Tensor, route_weights: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    by_route = torch.empty_like(home).index_copy(0, order, home)
    by_route = by_route.view(*route_weights.shape, tokens.shape[1])
    return (by_route * route_weights[..., None]).sum(1).to(tokens.dtype)


class _Swap(torch.autograd.Function):
    """all_to_all of rows; the backward swaps the directions."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, came: list[int], sent: list[int], group: Group) -> torch.Tensor:
        ctx.splits = sent, came, group
        out = rows.new_empty((sum(came), rows.shape[1]))
        collectives.all_to_all(out, rows.contiguous(), came, sent, group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        came, sent, group = ctx.splits
        return _Swap.apply(grad, came, sent, group), None, None, None


def _with_foreign(experts: ExpertWeights, plan: Plan, rank: int, group: Group) -> ExpertWeights:
    """Natives and the foreign experts of this rank, in the plan's order."""
    tensors = [_Travel.apply(tensor, plan, rank, group) for tensor in experts.tensors]
    names = [n for n in ("gate_up", "down", "gate_up_bias", "down_bias") if getattr(experts, n) is not None]
    rest = {n: getattr(experts, n) for n in ("transposed", "interleaved", "activation")}
    return ExpertWeights(**dict(zip(names, tensors)), **rest)


class _Travel(torch.autograd.Function):
    """[M + foreign, ...] weights; the backward brings the gradients home and adds them."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, plan: Plan, rank: int, group: Group) -> torch.Tensor:
        ctx.trip = plan, rank, group
        native = plan.num_native
        pieces = np.flatnonzero(plan.dest != plan.owner)
        foreign = pieces[plan.dest[pieces] == rank]
        out = weight.new_empty((native + len(foreign), *weight.shape[1:]))
        out[:native] = weight
        sends = [(weight[plan.expert[p] % native], int(plan.dest[p])) for p in pieces if plan.owner[p] == rank]
        receives = [(out[native + i], int(plan.owner[p])) for i, p in enumerate(foreign)]
        collectives.exchange(sends, receives, group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        plan, rank, group = ctx.trip
        native = plan.num_native
        pieces = np.flatnonzero(plan.dest != plan.owner)
        mine = [p for p in pieces if plan.owner[p] == rank]
        home = [grad.new_empty(grad.shape[1:]) for _ in mine]
        grad = grad.contiguous()
        sends = [(grad[native + i], int(plan.owner[p])) for i, p in enumerate(pieces[plan.dest[pieces] == rank])]
        collectives.exchange(sends, [(t, int(plan.dest[p])) for t, p in zip(home, mine)], group).wait()
        total = grad[:native].clone()
        for part, piece in zip(home, mine):
            total[plan.expert[piece] % native] += part
        return total, None, None, None
