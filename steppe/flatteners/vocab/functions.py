"""The two autograd Functions: gradients formed at once, and gradients formed again in the backward."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from steppe.flatteners.vocab import activations, one_pass, weights
from steppe.flatteners.vocab.batch import Batch, Call
from steppe.flatteners.vocab.objective import RowValues, Slopes, row_slopes, row_values
from steppe.runtime import collectives, scopes

Tensor = torch.Tensor
_FORWARD: dict[str, Callable[[Call, Batch], Tensor]] = {
    "weights": weights.forward,
    "activations": activations.forward,
    "local": lambda call, batch: one_pass.run(call, batch, 1.0, None),
    "one_pass": lambda call, batch: one_pass.run(call, batch, 1.0, None),
}


@contextlib.contextmanager
def at_work(call: Call, like: Tensor) -> Iterator[None]:
    """Labelled for the meter, timed, and outside of autocast: precision is decided tile by tile."""
    started = time.perf_counter()
    with scopes.label("vocab"), torch.autocast(like.device.type, enabled=False):
        yield
    call.stats.busy_s += time.perf_counter() - started


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses `create_graph=True`. torch's once_differentiable refuses only where the upstream gradient
    itself has a graph, and otherwise leaves second derivatives out without a word."""

    @functools.wraps(backward)
    def guarded(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "double backward through the vocabulary ring: its gradients have no graph; use create_graph=False, or "
                "steppe.flatteners.vocab.reference.plain_loss where second derivatives are needed"
            )
        return backward(*args)

    return guarded


class Inputs(NamedTuple):
    """Tensors of a call as the caller gave them; weight, bias and class weights still with padded rows."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    labels: Tensor
    index: Tensor | None

    def batch(self, call: Call) -> Batch:
        """Without padded rows, which never enter a product, and with vectors in the statistics' dtype."""
        real = call.head.shards[call.wire.me]
        batch = Batch(self.hidden, self.weight[:real].contiguous(), None, None, self.labels, self.index)
        vectors = (None if t is None else t[:real].to(batch.dtype).contiguous() for t in (self.bias, self.class_weight))
        bias, class_weight = vectors
        return replace(batch, bias=bias, class_weight=class_weight)

    def own_labels(self) -> Tensor:
        return self.labels if self.index is None else self.labels.index_select(0, self.index)


def states(call: Call, inputs: Inputs) -> RowValues:
    """Values of the counted rows, without gradients."""
    with at_work(call, inputs.hidden), torch.no_grad():
        state = _FORWARD[call.schedule](call, inputs.batch(call))
        return row_values(state, inputs.own_labels(), call.objective)


def keeps_graph() -> bool:
    """Whether the running backward was asked to keep the graph. A private name of torch, asked for here only: where it
    is missing the answer is yes, which costs a copy."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class AtOnce(torch.autograd.Function):
    """The summed loss over a divisor, with the gradients formed in the forward and scaled in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: Call, divisor: float | None, hidden: Tensor, weight: Tensor, bias: Tensor | None,
        class_weight: Tensor | None, labels: Tensor, index: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs = Inputs(hidden, weight, bias, class_weight, labels, index)
        with at_work(call, hidden):
            batch = inputs.batch(call)
            # The mean over class weights has a divisor that is known only after the last block.
            first = divisor if divisor is not None else float(max(1, sum(call.head.rows)))
            grads = _empty_gradients(ctx, inputs, batch)
            real = call.head.shards[call.wire.me]
            into = one_pass.Gradients(grads[0], *(None if g is None else g[:real] for g in grads[1:]))
            state = one_pass.run(call, batch, 1.0 / first, into)
            values = row_values(state, inputs.own_labels(), call.objective)
            total = values.loss.sum()
            last = torch.full_like(total, first)
            if divisor is None:
                assert values.target_weight is not None
                last = group_weight(values.target_weight, call)
            ctx.save_for_backward(*grads, first / last)
            ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
            ctx.call = call
            if values.correct is not None:
                ctx.mark_non_differentiable(values.correct)
            return total / last, values.correct

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *grads, correction = ctx.saved_tensors
        with at_work(ctx.call, upstream):
            scale, keep = upstream * correction, keeps_graph()
            scaled = (
                None if grad is None else (grad * scale if keep else grad.mul_(scale)).to(dtype)
                for grad, dtype in zip(grads, ctx.dtypes, strict=True)
            )
            hidden, weight, bias = scaled
        return None, None, hidden, weight, bias, None, None, None


def group_weight(target_weight: Tensor, call: Call) -> Tensor:
    """Sum over the group of the class weights of the labels; infinite where it is 0, so that loss and gradients are 0
    even with label smoothing, whose term has weights of its own."""
    total = collectives.all_reduce(target_weight.detach().sum(), call.wire.group)
    return torch.where(total == 0, torch.full_like(total, float("inf")), total)


def _empty_gradients(ctx: Any, inputs: Inputs, batch: Batch) -> list[Tensor | None]:
    """Gradients of hidden, weight and bias, None where not needed. float16 is too narrow to be scaled afterwards."""
    needs = ctx.needs_input_grad[2:5]
    dtype = batch.dtype if inputs.hidden.dtype == torch.float16 else inputs.hidden.dtype
    make = torch.empty if inputs.index is None else torch.zeros
    device = inputs.hidden.device
    hidden = make(inputs.hidden.shape, dtype=dtype, device=device) if needs[0] else None
    weight = torch.zeros(inputs.weight.shape, dtype=batch.dtype, device=device) if needs[1] else None
    bias = torch.zeros(inputs.weight.shape[:1], dtype=batch.dtype, device=device) if needs[2] else None
    return [hidden, weight, bias]


class Streamed(torch.autograd.Function):
    """Values of the counted rows [n]: loss, logprob, lse, entropy (these may be differentiated), and the others."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None, class_weight: Tensor | None,
        labels: Tensor, index: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        inputs = Inputs(hidden, weight, bias, class_weight, labels, index)
        with at_work(call, hidden):
            state = _FORWARD[call.schedule](call, inputs.batch(call))
            values = row_values(state, inputs.own_labels(), call.objective)
        ctx.save_for_backward(*inputs, state)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in (values.correct, values.target_weight) if t is not None))
        return tuple(values)

    @staticmethod
    @first_derivative_only
    def backward(  # type: ignore[override]
        ctx: Any,
        loss: Tensor | None,
        logprob: Tensor | None,
        lse: Tensor | None,
        entropy: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        *tensors, state = ctx.saved_tensors
        inputs, call = Inputs(*tensors), ctx.call

        def slopes(start: int, stop: int) -> Slopes:
            parts = (None if grad is None else grad[start:stop] for grad in (loss, logprob, lse, entropy))
            return row_slopes(state[start:stop], call.objective, *parts)

        with at_work(call, inputs.hidden):
            grads = _stream_backward(call, inputs, ctx.needs_input_grad[1:4], slopes)
        return None, *grads, None, None, None


def _stream_backward(
    call: Call, inputs: Inputs, needs: tuple[bool, ...], slopes: Callable[[int, int], Slopes]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of hidden, weight and bias under the streaming schedules."""
    batch, real = inputs.batch(call), call.head.shards[call.wire.me]
    by_weights = call.schedule == "weights"
    # A shard's gradient lands complete under `weights`; under `activations` it is the accumulator itself.
    dtype = inputs.weight.dtype if by_weights else batch.dtype
    weight = inputs.weight.new_zeros(inputs.weight.shape, dtype=dtype) if needs[1] else None
    bias = inputs.weight.new_zeros(inputs.weight.shape[:1], dtype=batch.dtype) if needs[2] else None
    parts = tuple(None if grad is None else grad[:real] for grad in (weight, bias))
    hidden = None
    if by_weights:
        rows = weights.backward(call, batch, slopes, *parts)
        if rows is not None:
            hidden = _spread(inputs, batch, rows)
    else:
        if needs[0]:
            hidden = torch.zeros_like(inputs.hidden, memory_format=torch.contiguous_format)
        activations.backward(call, batch, slopes, hidden, *parts)
    if weight is not None:
        weight = weight.to(inputs.weight.dtype)
    if bias is not None and inputs.bias is not None:
        bias = bias.to(inputs.bias.dtype)
    return hidden, weight, bias


def _spread(inputs: Inputs, batch: Batch, rows: Tensor) -> Tensor:
    """The gradient of all hidden states [N,H] from that of the counted rows."""
    if inputs.index is None:
        return rows.to(inputs.hidden.dtype)
    out = torch.zeros_like(inputs.hidden, memory_format=torch.contiguous_format)
    batch.land_rows(out, 0, rows.shape[0], rows)
    return out
