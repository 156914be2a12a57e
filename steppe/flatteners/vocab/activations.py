"""The `activations` schedule: vocabulary shards stay, blocks of tokens go round; 4 matrix passes.

What a rank finds out about a visiting block (states in the forward, float32 gradients in the backward) goes straight
back to the block's owner.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from steppe.flatteners.vocab.batch import Batch, Call, Shard, Tools
from steppe.flatteners.vocab.objective import Slopes, empty_state, merge, pack, unpack
from steppe.flatteners.vocab.tile import Rows, fold_block, gradient_block
from steppe.flatteners.vocab.travel import Circle, Homing

Tensor = torch.Tensor


def _own_shard(call: Call, batch: Batch) -> Shard:
    return Shard(batch.weight, batch.bias, batch.class_weight, call.starts[call.wire.me])


def forward(call: Call, batch: Batch) -> Tensor:
    """[n,K]: the states of this rank's counted rows over the whole vocabulary."""
    tools, shard, objective = Tools.of(call, batch), _own_shard(call, batch), call.objective
    sizes = call.head.rows, call.tiles.chunk
    state = empty_state(call.head.rows[call.wire.me], objective, batch.hidden, batch.dtype)

    def combine(home: tuple[Tensor, ...], arrived: tuple[Tensor, ...]) -> None:
        home[0].copy_(merge(torch.stack((home[0], arrived[0])), objective))

    def land(start: int, stop: int, home: tuple[Tensor, ...]) -> None:
        state[start:stop] = home[0]

    tails = [(len(objective.fields),)]
    homing = Homing(call.wire, *sizes, tails, batch.hidden, batch.dtype, 0, combine, land)

    def own(start: int, stop: int) -> tuple[Tensor, ...]:
        return batch.rows(start, stop), batch.row_labels(start, stop)

    for visit in Circle(call.wire, *sizes, own).visits():
        (found,) = homing.room(visit)
        found[:, 0] = float("-inf")
        fold_block(tools, found, Rows.of(*visit.tensors), shard)
        homing.send(visit, (found,))
    homing.settle()
    return state


def backward(
    call: Call, batch: Batch, slopes: Callable[[int, int], Slopes], grad_hidden: Tensor | None,
    grad_weight: Tensor | None, grad_bias: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradient of the hidden states [N,H] and add those of weight and bias, where given."""
    tools, shard = Tools.of(call, batch), _own_shard(call, batch)
    sizes = call.head.rows, call.tiles.chunk

    def combine(home: tuple[Tensor, ...], arrived: tuple[Tensor, ...]) -> None:
        home[0].add_(arrived[0])

    def land(start: int, stop: int, home: tuple[Tensor, ...]) -> None:
        batch.land_rows(grad_hidden, start, stop, home[0])

    tails = [(batch.hidden.shape[1],)]
    homing = None
    if grad_hidden is not None:
        homing = Homing(call.wire, *sizes, tails, batch.hidden, batch.dtype, 1, combine, land)

    def own(start: int, stop: int) -> tuple[Tensor, ...]:
        return batch.rows(start, stop), batch.row_labels(start, stop), pack(slopes(start, stop))

    for visit in Circle(call.wire, *sizes, own).visits():
        hidden, labels, packed = visit.tensors
        results = homing.room(visit) if homing else (None,)
        part = _reader(packed)
        gradient_block(tools, part, Rows.of(hidden, labels), shard, results[0], grad_weight, grad_bias)
        if homing:
            homing.send(visit, results)
    if homing:
        homing.settle()


def _reader(packed: Tensor) -> Callable[[int, int], Slopes]:
    return lambda start, stop: unpack(packed[start:stop])
