"""Ring-DTP: the vocabulary projection and cross-entropy that never hold N x V logits.

Note [shares]. Every rank of the group brings its own tokens and its own rows of the vocabulary. A reduced loss is this
rank's share: the shares of all ranks sum to the loss over all tokens of the group, and gradients are those of that sum.
So the mean's divisor counts the group's tokens, never one rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from steppe.flatteners.vocab.batch import Call
from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.functions import AtOnce, Inputs, Streamed, group_weight, states
from steppe.flatteners.vocab.objective import RowValues
from steppe.flatteners.vocab.prepare import Given, Request, prepare
from steppe.flatteners.vocab.stats import RingStats
from steppe.runtime.collectives import Group

Tensor = torch.Tensor
_AUTO = VocabPolicy()


class RingDTPOutput(NamedTuple):
    """What was asked for; the rest is None. `loss` follows the reduction; logprob, entropy and lse have the labels'
    shape and are 0 where the label is ignored; `num_correct` counts this rank's tokens whose label is the argmax."""

    loss: Tensor | None
    logprob: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None
    num_correct: Tensor | None


def ring_dtp_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, group: Group = None, reduction: str = "mean",
    ignore_index: int = -100, num_items_in_batch: float | Tensor | None = None, bias: Tensor | None = None,
    class_weight: Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, vocab_size: int | None = None,
    policy: VocabPolicy = _AUTO, stats: RingStats | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy of `hidden` [...,H] against `labels` [...] over a vocabulary sharded by rows: `ring_dtp(...).loss`.

    Peak, Exactness, Raises: as `ring_dtp`.
    """
    output = ring_dtp(
        hidden, weight, labels, group=group, reduction=reduction, ignore_index=ignore_index,
        num_items_in_batch=num_items_in_batch, bias=bias, class_weight=class_weight, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, logit_scale=logit_scale, vocab_size=vocab_size, policy=policy, stats=stats,
    )  # fmt: skip
    assert output.loss is not None
    return output.loss


def ring_dtp(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, group: Group = None, reduction: str = "mean",
    ignore_index: int = -100, num_items_in_batch: float | Tensor | None = None, bias: Tensor | None = None,
    class_weight: Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, vocab_size: int | None = None,
    want: Sequence[str] = ("loss",), policy: VocabPolicy = _AUTO, stats: RingStats | None = None,
) -> RingDTPOutput:  # fmt: skip
    """Loss, log-probability, entropy, log-sum-exp and accuracy of `hidden` [...,H] against `labels` [...].

    `weight` [V_r,H], `bias` and `class_weight` [V_r] are this rank's rows of the vocabulary, in rank order; shards may
    be uneven or empty, and so may the ranks' tokens. Logits are softcap * tanh(logit_scale * (h W^T + bias) / softcap).
    Rows at and beyond `vocab_size` are padding. Every rank of `group` must call; None is this process alone. A reduced
    loss is this rank's share (Note [shares]); the mean's divisor is `num_items_in_batch`, else the group's count of
    labels, else the sum of their class weights. z_loss * lse^2 is added to each token's loss. Statistics and loss are
    float32 (float64 for float64 inputs).

    Peak: `budget.transient`: one strip of logits and travelling buffers, both of fixed bytes, and a few numbers a
    token. No tensor of N x V/P elements.
    Exactness: reordered over H, V and N.
    Raises: ShapeError, ConfigError and DataError (labels), on every rank, before the first block is sent.
    Source: arXiv 2609.14306; online softmax: arXiv 1805.02867.
    """
    stats = RingStats() if stats is None else stats
    request = Request(
        reduction, ignore_index, num_items_in_batch, label_smoothing, z_loss, softcap, logit_scale, vocab_size,
        tuple(want), policy,
    )  # fmt: skip
    given = Given(hidden, weight, labels, bias, class_weight)
    call, inputs = prepare(request, given, group, stats)
    grad = any(given.needs_grad()) and set(request.want) != {"num_correct"}
    return _evaluate(call, inputs, request, grad, labels.shape)


def _evaluate(call: Call, inputs: Inputs, request: Request, grad: bool, shape: torch.Size) -> RingDTPOutput:
    """Run the call under the Function that fits, and give every value its shape."""
    divisor = _divisor(call, request)
    if grad and call.schedule in ("local", "one_pass"):
        loss, correct = AtOnce.apply(call, divisor, *inputs)
        return RingDTPOutput(loss if "loss" in request.want else None, None, None, None, _count(correct))
    values = RowValues(*Streamed.apply(call, *inputs)) if grad else states(call, inputs)
    fields = {
        name: _to_all_rows(getattr(values, name), inputs, shape) if name in request.want else None
        for name in ("logprob", "entropy", "lse")
    }
    loss = _reduce(values, inputs, request, divisor, call, shape) if "loss" in request.want else None
    return RingDTPOutput(loss=loss, num_correct=_count(values.correct), **fields)


def _divisor(call: Call, request: Request) -> float | None:
    """What the sum is divided by; None: the sum of class weights, which is known after the last block. No labels at
    all give a loss of 0."""
    if request.reduction != "mean":
        return 1.0
    if request.num_items_in_batch is not None:
        return float(request.num_items_in_batch)
    return None if call.objective.weighted else float(max(1, sum(call.head.rows)))


def _reduce(
    values: RowValues, inputs: Inputs, request: Request, divisor: float | None, call: Call, shape: torch.Size
) -> Tensor:
    if request.reduction == "none":
        return _to_all_rows(values.loss, inputs, shape)
    total = values.loss.sum()
    if divisor is not None:
        return total / torch.full_like(total, divisor)
    assert values.target_weight is not None
    return total / group_weight(values.target_weight, call)


def _to_all_rows(values: Tensor, inputs: Inputs, shape: torch.Size) -> Tensor:
    """[n] -> the labels' shape, 0 where the label is ignored."""
    if inputs.index is not None:
        values = values.new_zeros(inputs.labels.shape).index_copy(0, inputs.index, values)
    return values.reshape(shape)


def _count(correct: Tensor | None) -> Tensor | None:
    return None if correct is None else correct.sum()
