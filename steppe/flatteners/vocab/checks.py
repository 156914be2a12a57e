"""What a call refuses on its own, before it speaks to other ranks."""

from __future__ import annotations

from typing import Any

import torch

from steppe.core.errors import ConfigError, ShapeError
from steppe.flatteners.vocab.objective import WANTS

Tensor = torch.Tensor
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, vectors: dict[str, Tensor | None]
) -> None:  # fmt: skip
    """Raises: ShapeError where tensors don't fit together; `vectors` are [V_r]."""
    check_weight(weight)
    for name, tensor in (("hidden", hidden), ("weight", weight), *vectors.items()):
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS):
            raise ShapeError(
                name, got=getattr(tensor, "dtype", type(tensor).__name__), allowed=f"a tensor of {FLOATS}",
                remedy=f"cast {name} to a floating dtype",
            )  # fmt: skip
    if hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ShapeError(
            "hidden states", got=f"{tuple(hidden.shape)} for a weight of {tuple(weight.shape)}",
            allowed=f"[..., {weight.shape[1]}]", remedy="give what goes into the head",
        )  # fmt: skip
    if (hidden.dtype == torch.float64) != (weight.dtype == torch.float64):
        raise ShapeError(
            "dtypes", got=f"hidden {hidden.dtype}, weight {weight.dtype}", allowed="both or neither float64",
            remedy="cast one of them",
        )  # fmt: skip
    for name, vector in vectors.items():
        if vector is not None and vector.shape != weight.shape[:1]:
            raise ShapeError(
                name, got=tuple(vector.shape), allowed=f"{tuple(weight.shape[:1])}, this rank's shard like the weight",
                remedy=f"shard {name} as the weight is sharded",
            )  # fmt: skip
    if (weights := vectors.get("class_weight")) is not None and weights.requires_grad:
        raise ShapeError(
            "class_weight", got="requires_grad=True", allowed="a constant, as in torch", remedy="detach it"
        )
    if labels is not None:
        _check_labels(labels, hidden)
    devices = {str(t.device) for t in (hidden, weight, labels, *vectors.values()) if t is not None}
    if len(devices) > 1:
        raise ShapeError("devices", got=sorted(devices), allowed="one device", remedy="move the tensors together")


def _check_labels(labels: Tensor, hidden: Tensor) -> None:
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            "labels", got=getattr(labels, "dtype", type(labels).__name__), allowed="an int64 or int32 tensor",
            remedy="give class indices; probabilities as targets are not supported",
        )  # fmt: skip
    if labels.shape != hidden.shape[:-1]:
        raise ShapeError(
            "labels", got=tuple(labels.shape), allowed=f"{tuple(hidden.shape[:-1])}, one for each hidden state",
            remedy="shift labels yourself, then give both with the same leading shape",
        )  # fmt: skip


def check_weight(weight: Any) -> None:
    """Raises: ShapeError for what wrappers make of a weight."""
    if not isinstance(weight, Tensor):
        raise ShapeError(
            "weight", got=type(weight).__name__, allowed="the head's weight, a tensor [V_r, H]",
            remedy="give head.weight; merge LoRA adapters into it first",
        )  # fmt: skip
    if weight.dim() != 2:
        raise ShapeError(
            "weight", got=f"{weight.dim()}-dimensional {tuple(weight.shape)}", allowed="[V_r, H], two dimensions",
            remedy="FSDP1 and ZeRO-3 flatten or empty the weights they wrap: leave the head out of the wrapper and "
            "give its vocabulary shard",
        )  # fmt: skip
    if hasattr(weight, "to_local"):
        raise ShapeError(
            "weight", got="a DTensor", allowed="this rank's plain shard [V_r, H]",
            remedy="give weight.to_local(), or use RingDTPLoss",
        )  # fmt: skip


def check_options(
    *, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, vocab_size: int | None,
    want: tuple[str, ...], num_items_in_batch: object,
) -> None:  # fmt: skip
    """Raises: ConfigError for values without a meaning."""
    rules = (
        ("reduction", reduction, reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"'),
        ("label_smoothing", label_smoothing, 0.0 <= label_smoothing <= 1.0, "0 to 1"),
        ("z_loss", z_loss, z_loss >= 0.0, "0 or more"),
        ("softcap", softcap, softcap is None or softcap > 0.0, "above 0, or None"),
        ("vocab_size", vocab_size, vocab_size is None or vocab_size > 0, "1 or more, or None for all rows"),
        ("want", want, bool(want) and set(want) <= set(WANTS), f"some of {WANTS}"),
    )
    for name, got, fine, allowed in rules:
        if not fine:
            raise ConfigError(name, got=repr(got), allowed=allowed, remedy=f"change {name}")
    if num_items_in_batch is not None and (reduction != "mean" or not float(num_items_in_batch) > 0):  # type: ignore[arg-type]
        raise ConfigError(
            "num_items_in_batch", got=f"{num_items_in_batch} with reduction {reduction!r}",
            allowed='a number above 0 with reduction "mean", whose divisor it replaces',
            remedy='use reduction="mean", or divide the sum yourself',
        )  # fmt: skip
