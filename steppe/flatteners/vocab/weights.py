"""The `weights` schedule: tokens stay, vocabulary shards go round; 4 matrix passes.

In the backward a shard goes round again and the gradient that a rank has for it goes straight home, in float32. On one
rank this is the tiled program with recompute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from steppe.flatteners.vocab.batch import Batch, Call, Shard, Tools
from steppe.flatteners.vocab.objective import Slopes, empty_state
from steppe.flatteners.vocab.tile import Rows, fold_block, gradient_block
from steppe.flatteners.vocab.travel import Circle, Homing, Visit

Tensor = torch.Tensor


def _own_rows(call: Call, batch: Batch) -> Rows:
    return Rows(call.head.rows[call.wire.me], batch.rows, batch.row_labels)


def _visiting(call: Call, batch: Batch, visit: Visit) -> Shard:
    return Shard.of(visit.tensors, call.starts[visit.owner] + visit.start, has_bias=batch.bias is not None)


def forward(call: Call, batch: Batch) -> Tensor:
    """[n,K]: the states of this rank's counted rows over the whole vocabulary."""
    tools, rows = Tools.of(call, batch), _own_rows(call, batch)
    state = empty_state(rows.length, call.objective, batch.hidden, batch.dtype)
    for visit in Circle(call.wire, call.head.shards, call.tiles.chunk, batch.shard).visits():
        fold_block(tools, state, rows, _visiting(call, batch, visit))
    return state


def backward(
    call: Call, batch: Batch, slopes: Callable[[int, int], Slopes], grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Write the gradients of weight and bias where given; return that of the counted rows [n,H], or None."""
    tools, rows = Tools.of(call, batch), _own_rows(call, batch)
    width = batch.hidden.shape[1]
    grad_rows = batch.hidden.new_zeros((rows.length, width), dtype=batch.dtype) if call.head.hidden_grad else None
    targets = [grad for grad in (grad_weight, grad_bias) if grad is not None]

    def combine(home: tuple[Tensor, ...], arrived: tuple[Tensor, ...]) -> None:
        for mine, theirs in zip(home, arrived, strict=True):
            mine.add_(theirs)

    def land(start: int, stop: int, home: tuple[Tensor, ...]) -> None:
        for target, values in zip(targets, home, strict=True):
            target[start:stop].copy_(values)

    tails = [tuple(grad.shape[1:]) for grad in targets]
    sizes, payload = (call.head.shards, call.tiles.chunk), int(grad_weight is not None)
    homing = Homing(call.wire, *sizes, tails, batch.hidden, batch.dtype, payload, combine, land) if targets else None
    for visit in Circle(call.wire, *sizes, batch.shard).visits():
        room = iter(homing.room(visit) if homing else ())
        parts = [None if grad is None else next(room) for grad in (grad_weight, grad_bias)]
        gradient_block(tools, slopes, rows, _visiting(call, batch, visit), grad_rows, *parts)
        if homing:
            homing.send(visit, tuple(part for part in parts if part is not None))
    if homing:
        homing.settle()
    return grad_rows
