"""The ring's online reduction for other long axes: log-sum-exp, softmax-weighted sums and top-k over a sharded axis.

Rows x [...,H] stay with their ranks; the rows of `weight` [V_r,H], scored by x W^T, go round as under the `weights`
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from steppe.core.errors import ConfigError, ShapeError
from steppe.flatteners.vocab.batch import Call, Shard, Tools
from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.functions import Inputs, at_work, first_derivative_only
from steppe.flatteners.vocab.objective import empty_state, merge
from steppe.flatteners.vocab.prepare import Given, Request, prepare
from steppe.flatteners.vocab.ring import ring_dtp
from steppe.flatteners.vocab.stats import RingStats
from steppe.flatteners.vocab.strip import StripSpace
from steppe.flatteners.vocab.tile import Rows, add_products, empty_strips, strips
from steppe.flatteners.vocab.travel import Circle, Homing
from steppe.runtime.collectives import Group

Tensor = torch.Tensor
_STREAM = VocabPolicy(schedule="weights")


def ring_logsumexp(
    x: Tensor, weight: Tensor, *, group: Group = None, policy: VocabPolicy = _STREAM, stats: RingStats | None = None
) -> Tensor:
    """log sum_v exp(x W^T)_v over the rows of all ranks' weights: x [...,H] -> [...]. Differentiable.

    Peak, Exactness: as `ring_dtp` under the policy's schedule.
    """
    labels = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    lse = ring_dtp(
        x, weight, labels, group=group, reduction="none", want=("lse",), policy=policy, stats=stats
    ).lse  # fmt: skip
    assert lse is not None
    return lse


def ring_softmax_matmul(
    x: Tensor, weight: Tensor, values: Tensor, *, group: Group = None, policy: VocabPolicy = _STREAM,
    stats: RingStats | None = None,
) -> Tensor:  # fmt: skip
    """softmax(x W^T) values, over the rows of all ranks: x [...,H], weight [V_r,H], values [V_r,D] -> [...,D].

    Peak: two strips, travelling chunks of weight and values, an accumulator [n,D]. Exactness: reordered over V.
    Raises: as `ring_dtp`.
    """
    call, inputs = _prepare(_GivenValues(x, weight, _zeros(x), None, None, values), group, policy, stats)
    return _SoftmaxMatmul.apply(call, inputs.hidden, weight, values).view(*x.shape[:-1], values.shape[1])


def ring_topk(
    x: Tensor, weight: Tensor, k: int, *, group: Group = None, policy: VocabPolicy = _STREAM,
    stats: RingStats | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The k largest of (x W^T)_v over the rows of all ranks, sorted: x [...,H] -> values and global rows [...,k].

    Values are differentiable and float32 at least. Of equal values any may be named, as in torch.
    Peak: one strip, travelling chunks, two numbers for each of the k. Exactness: reordered over H.
    Raises: as `ring_dtp`; ConfigError where k is not 1 to the number of rows.
    """
    call, inputs = _prepare(_GivenCount(x, weight, _zeros(x), None, None, k), group, policy, stats)
    if not 1 <= k <= call.head.vocab:
        raise ConfigError("k", got=k, allowed=f"1 to {call.head.vocab}", remedy="ask for fewer rows")
    values, rows = _TopK.apply(call, inputs.hidden, weight, k)
    return values.view(*x.shape[:-1], k), rows.view(*x.shape[:-1], k)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)


@dataclass(frozen=True)
class _GivenValues(Given):
    values: Tensor

    def check(self) -> None:
        super().check()
        if self.values.dim() != 2 or self.values.shape[0] != self.weight.shape[0]:
            raise ShapeError(
                "values", got=tuple(self.values.shape), allowed=f"[{self.weight.shape[0]}, D]",
                remedy="give one row of values for each row of the weight",
            )  # fmt: skip
        if self.values.dtype != self.weight.dtype:
            raise ShapeError(
                "values", got=self.values.dtype, allowed=self.weight.dtype, remedy="cast values to the weight's dtype"
            )

    def needs_grad(self) -> tuple[bool, ...]:
        return *super().needs_grad(), torch.is_grad_enabled() and self.values.requires_grad

    def fingerprint(self) -> tuple[object, ...]:
        return *super().fingerprint(), self.values.shape[1]


@dataclass(frozen=True)
class _GivenCount(Given):
    k: int

    def fingerprint(self) -> tuple[object, ...]:
        return *super().fingerprint(), self.k


def _prepare(given: Given, group: Group, policy: VocabPolicy, stats: RingStats | None) -> tuple[Call, Inputs]:
    if policy.schedule not in ("auto", "weights"):
        raise ConfigError("schedule", got=policy.schedule, allowed='"weights"', remedy="leave the schedule out")
    policy = VocabPolicy("weights", policy.tile_tokens, policy.tile_vocab, policy.num_chunks, policy.budget_bytes)
    request = Request("none", -1, None, 0.0, 0.0, None, 1.0, None, ("lse",), policy)
    return prepare(request, given, group, RingStats() if stats is None else stats)


def _add(home: tuple[Tensor, ...], arrived: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(home, arrived, strict=True):
        mine.add_(theirs)


class _Round:
    """One round of the weight's rows (and `beside`, sharded alike) past this rank's rows x [n,H]."""

    def __init__(self, call: Call, x: Tensor, weight: Tensor, *beside: Tensor) -> None:
        labels = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        self.call, self.batch = call, Inputs(x, weight, None, None, labels, None).batch(call)
        self.tools = Tools.of(call, self.batch)
        self.rows = Rows(x.shape[0], self.batch.rows, self.batch.row_labels)
        self._own = (self.batch.weight, *(t.contiguous() for t in beside))
        self.circle = Circle(call.wire, call.head.shards, call.tiles.chunk, self._share)

    def _share(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(t[start:stop] for t in self._own)

    def shard(self, visit: Any) -> Shard:
        return Shard(visit.tensors[0], None, None, self.call.starts[visit.owner] + visit.start)

    def homing(self, *targets: Tensor) -> Homing:
        """Gradients of `targets`, sharded like the weight, on their way home."""

        def land(start: int, stop: int, home: tuple[Tensor, ...]) -> None:
            for target, found in zip(targets, home, strict=True):
                target[start:stop].copy_(found)

        tails = [tuple(t.shape[1:]) for t in targets]
        sizes = self.call.head.shards, self.call.tiles.chunk
        return Homing(self.call.wire, *sizes, tails, self.batch.hidden, self.batch.dtype, len(tails), _add, land)

    def accumulator(self, width: int) -> Tensor:
        return self.batch.hidden.new_zeros((self.rows.length, width), dtype=self.batch.dtype)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with at_work(call, x):
            turn = _Round(call, x, weight)
            values = turn.accumulator(k).fill_(float("-inf"))
            places = torch.zeros_like(values, dtype=torch.int64)
            for visit in turn.circle.visits():
                for strip in strips(turn.tools, turn.rows, turn.shard(visit)):
                    found, at = strip.logits.topk(min(k, strip.logits.shape[1]), dim=1)
                    met = torch.cat((values[strip.rows], found), 1)
                    known = torch.cat((places[strip.rows], at + strip.shard.start), 1)
                    values[strip.rows], pick = met.topk(k, dim=1)
                    places[strip.rows] = known.gather(1, pick)
        ctx.call = call
        ctx.save_for_backward(x, weight, places)
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, places = ctx.saved_tensors
        with at_work(ctx.call, x):
            turn, into = _Round(ctx.call, x, weight), torch.empty_like(weight)
            homing, grad_rows = turn.homing(into), turn.accumulator(x.shape[1])
            for visit in turn.circle.visits():
                (room,) = homing.room(visit)
                for strip in empty_strips(turn.tools, turn.rows, turn.shard(visit)):
                    columns = places[strip.rows] - strip.shard.start
                    hit = (columns >= 0) & (columns < strip.logits.shape[1])
                    strip.logits.zero_().scatter_add_(
                        1, torch.where(hit, columns, 0), torch.where(hit, grad[strip.rows], 0.0)
                    )
                    add_products(turn.tools, strip, grad_rows, room)
                homing.send(visit, (room,))
            homing.settle()
        return None, grad_rows.to(x.dtype), into, None


class _SoftmaxMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, weight: Tensor, values: Tensor) -> Tensor:  # type: ignore[override]
        read = call.objective.read
        with at_work(call, x):
            turn = _Round(call, x, weight, values)
            state = empty_state(turn.rows.length, call.objective, x, turn.batch.dtype)
            total = turn.accumulator(values.shape[1])
            for visit in turn.circle.visits():
                for strip in strips(turn.tools, turn.rows, turn.shard(visit)):
                    old = state[strip.rows]
                    met = turn.tools.space.fold(strip.logits, strip.own(turn.rows), strip.shard.start, None)
                    new = merge(torch.stack((old, met)), call.objective)
                    total[strip.rows] *= torch.exp(read(old, "peak") - read(new, "peak"))[:, None]
                    strip.logits.sub_(read(new, "peak")[:, None]).exp_()
                    beside = turn.tools.products.operand(
                        visit.tensors[1][strip.columns], "values", call.tiles.tile_vocab
                    )  # fmt: skip
                    turn.tools.products.add_hidden(total[strip.rows], strip.logits, beside)
                    state[strip.rows] = new
            out = total.div_(read(state, "total")[:, None])
        ctx.call = call
        ctx.save_for_backward(x, weight, values, state, out)
        return out.to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, values, state, out = ctx.saved_tensors
        call = ctx.call
        grad = grad.to(out.dtype)
        with at_work(call, x):
            turn = _Round(call, x, weight, values)
            second = StripSpace(call.tiles.strip_bytes, 0, call.objective, x, out.dtype)
            into = torch.empty_like(weight), torch.empty_like(values)
            homing, grad_rows = turn.homing(*into), turn.accumulator(x.shape[1])
            common = (grad * out).sum(1)
            for visit in turn.circle.visits():
                room, room_values = homing.room(visit)
                for strip in strips(turn.tools, turn.rows, turn.shard(visit)):
                    part, products = state[strip.rows], turn.tools.products
                    strip.logits.sub_(call.objective.read(part, "peak")[:, None]).exp_()
                    strip.logits.div_(call.objective.read(part, "total")[:, None])
                    upstream = grad[strip.rows]
                    products.add_weight(room_values[strip.columns], strip.logits, upstream)
                    slope = second.strip(*strip.logits.shape)
                    beside = products.operand(visit.tensors[1][strip.columns], "values", call.tiles.tile_vocab)
                    products.logits(slope, upstream, beside, None, 1.0)
                    strip.logits.mul_(slope.sub_(common[strip.rows][:, None]))
                    add_products(turn.tools, strip, grad_rows, room)
                homing.send(visit, (room, room_values))
            homing.settle()
        return None, grad_rows.to(x.dtype), *into
