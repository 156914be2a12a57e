"""The shortest honest program: whole logits, torch's cross-entropy. Imports nothing that it judges."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def plain_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, softcap: float | None = None,
    logit_scale: float = 1.0, vocab_size: int | None = None,
) -> Tensor:  # fmt: skip
    """[...,V]: logits of the whole vocabulary, without padded rows, in float32 at least."""
    logits = F.linear(hidden, weight, bias)[..., :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def plain_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, reduction: str = "mean", ignore_index: int = -100,
    num_items_in_batch: float | None = None, class_weight: Tensor | None = None, label_smoothing: float = 0.0,
    z_loss: float = 0.0, **logit_options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Every value of `ring_dtp` for all tokens of a group in one process, from whole logits.

    Peak: 3 tensors of N x V in float32, and the logits in the inputs' dtype where that is narrower.
    """
    logits = plain_logits(hidden, weight, **logit_options).flatten(0, -2)
    flat, valid = labels.flatten(), labels.flatten() != ignore_index
    weights = None if class_weight is None else class_weight[: logits.shape[1]].to(logits.dtype)
    losses = F.cross_entropy(
        logits, flat, weight=weights, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    lse = torch.where(valid, torch.logsumexp(logits, -1), 0.0)
    losses = losses + z_loss * lse.square()
    log_softmax = F.log_softmax(logits, -1)
    logprob = log_softmax.gather(1, torch.where(valid, flat, 0)[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax.clamp(min=-1000.0)).sum(-1)  # exp is 0 there: p log p is 0 where p is
    divisor = valid.sum() if weights is None else weights[torch.where(valid, flat, 0)][valid].sum()
    if num_items_in_batch is not None:
        divisor = torch.as_tensor(num_items_in_batch)
    divisor = divisor.clamp(min=1) if weights is None else torch.where(divisor == 0, float("inf"), divisor)
    loss = {"none": losses.view(labels.shape), "sum": losses.sum(), "mean": losses.sum() / divisor.to(losses.dtype)}
    return {
        "loss": loss[reduction],
        "logprob": torch.where(valid, logprob, 0.0).view(labels.shape),
        "entropy": torch.where(valid, entropy, 0.0).view(labels.shape),
        "lse": lse.view(labels.shape),
        "num_correct": (logits.argmax(-1) == flat)[valid].sum(),
    }
