"""Values and gradients by closed forms in numpy's extended precision: what float64 itself is judged by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def closed_forms(
    tensors: Any, want: tuple[str, ...], *, reduction: str = "mean", ignore_index: int = -100,
    num_items_in_batch: float | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, logit_scale: float = 1.0, vocab_size: int | None = None,
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """The values of `plain_loss`, and the gradients of hidden, weight and bias of what `programs` differentiates."""
    hidden, weight = _wide(tensors.hidden), _wide(tensors.weight)
    rows, vocab = len(hidden), vocab_size or len(weight)
    bias = np.zeros(len(weight)) if tensors.bias is None else _wide(tensors.bias)
    shares = np.ones(vocab) if tensors.class_weight is None else _wide(tensors.class_weight)[:vocab]
    labels, valid = tensors.labels.numpy(), (tensors.labels != ignore_index).numpy()
    hit = np.zeros((rows, vocab), np.longdouble)
    hit[valid, labels[valid]] = 1
    z = (hidden @ weight[:vocab].T + bias[:vocab]) * np.longdouble(logit_scale)
    bend = np.longdouble(1)
    if softcap is not None:
        bend = 1 - np.tanh(z / softcap) ** 2
        z = softcap * np.tanh(z / softcap)
    top = z.max(1, keepdims=True)
    lse = np.log(np.exp(z - top).sum(1, keepdims=True)) + top
    log_p = z - lse
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1, keepdims=True)
    smooth = np.longdouble(label_smoothing) / vocab * shares
    aim = (1 - np.longdouble(label_smoothing)) * hit * shares + smooth  # loss = -(aim . log_p) + z_loss lse^2
    loss = -(aim * log_p).sum(1) + z_loss * lse[:, 0] ** 2
    divisor = np.longdouble(num_items_in_batch or ((hit * shares).sum() or np.inf))
    divisor = divisor if reduction == "mean" else np.longdouble(1)
    values = {"loss": loss, "logprob": (hit * log_p).sum(1), "entropy": entropy[:, 0], "lse": lse[:, 0]}
    values = {name: np.where(valid, value, 0) for name, value in values.items()}
    slopes = {
        "loss": p * aim.sum(1, keepdims=True) - aim + 2 * z_loss * lse * p,
        "logprob": hit - p,
        "entropy": -p * (log_p + entropy),
        "lse": p,
    }
    upstream = {name: _wide(vector) for name, vector in tensors.upstream.items()}
    if reduction != "none":
        upstream["loss"] = np.full(rows, np.longdouble(0.75)) / divisor
        values["loss"] = values["loss"].sum() / divisor
    grad = sum(upstream[name][:, None] * slopes[name] for name in slopes if name in want)
    grad = grad * bend * valid[:, None] * logit_scale
    whole = np.zeros((rows, len(weight)), np.longdouble)
    whole[:, :vocab] = grad
    found = {name: _narrow(value) for name, value in values.items()}
    found["num_correct"] = torch.tensor(int((z.argmax(1) == labels)[valid].sum()))
    return found, (_narrow(whole @ weight), _narrow(whole.T @ hidden), _narrow(whole.sum(0)))


def _wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.longdouble)


def _narrow(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64))
