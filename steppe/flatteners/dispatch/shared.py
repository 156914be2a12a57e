"""Shared experts run before the routed ones, so that nothing behind the experts saves a tensor.

Torch's checkpoint ends a recompute at the last saved tensor. A shared expert that runs behind the routed ones saves its
activations there, and the routed experts would run forward twice a step; run first, the same bits cost one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steppe.core.errors import ConflictError


def run_first(block: Any, name: str) -> Callable[[], None]:
    """Make `block` compute its shared expert `name` first; returns the undo."""
    if isinstance(getattr(block, f"{name}_gate", None), nn.Module):
        return replace_forward(block, lambda hidden: _gated_block(block, name, hidden))
    shared = getattr(block, name)
    plain_block, plain_shared = block.forward, shared.forward
    kept: list[torch.Tensor] = []

    def block_forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept.append(shared(hidden))
        try:
            return plain_block(hidden, *args, **kwargs)
        finally:  # a checkpoint's early stop leaves by exception
            kept.clear()

    def shared_forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return kept.pop() if kept else plain_shared(*args, **kwargs)

    undo = replace_forward(block, block_forward), replace_forward(shared, shared_forward)
    return lambda: [step() for step in undo] and None


def _gated_block(block: Any, name: str, hidden: torch.Tensor) -> torch.Tensor:
    """A block of the Qwen2-MoE kind: routed experts + sigmoid(gate(x)) * shared(x)."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    shared = F.sigmoid(getattr(block, f"{name}_gate")(rows)) * getattr(block, name)(rows)
    _, weights, ids = block.gate(rows)
    return (block.experts(rows, ids, weights) + shared).reshape(hidden.shape)


class Joined:
    """A forward that belongs to one very module: in a copy of the module it would run the original."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __reduce__(self) -> Any:  # copies and pickles both ask for it
        raise ConflictError(
            "a copy of the model", got="PipelinedLLEP is attached to it", allowed="a plain model",
            remedy="copy before attaching, or detach() first; its state_dict() can be saved at any time",
        )  # fmt: skip


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Set the instance's forward; the undo restores what the instance had."""
    before = module.__dict__.get("forward")
    module.forward = Joined(forward)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return undo
