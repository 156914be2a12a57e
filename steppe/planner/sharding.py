"""Weights, gradients and what FSDP2 gathers: the terms that grow with parameters and belong to no flattener.

Expert parallelism divides the routed experts by E_p; FSDP2 shards them over the W/E_p ranks that hold the same ones,
and everything else over all W. So every rank keeps total/W parameters, but it gathers only its own experts of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from steppe.core import parameters
from steppe.core.ledger import (
    ALWAYS,
    ATTENTION_BACKWARD,
    BLOCK_BACKWARD,
    EARLY_GRADIENTS,
    EXPERTS_EARLY,
    EXPERTS_REDUCED,
    FIRST_BLOCKS,
    GRADIENT_SHARDS,
    HEAD_GATHERED,
    HEAD_GRADIENT,
    STEP,
    Entry,
    Moment,
)
from steppe.core.shapes import RunShape

_DENSE = frozenset({Moment.DENSE_END})
SUM_BYTES: Final = 4
_MODEL_RUNS = frozenset({Moment.FORWARD, Moment.LOSS}) | BLOCK_BACKWARD


def sharding_entries(shape: RunShape) -> Iterator[Entry]:
    """Weights, gradients and gathered layers of one rank.

    Peak: weights total/W always; gradients total/W (whole copies below ZeRO-3 and ZeRO-2); the block at work whole,
    the next block gathered early, the last one's gradients on their way into the reduce-scatter and, once the MLP's
    backward is over, its own gradients: 3 or 4 blocks; embedding and head whole from forward to backward.
    """
    yield Entry("weights", "weights of the shards", held_weights(shape) * shape.dtypes.weight_bytes, ALWAYS)
    yield from _gradients(shape)
    yield from _gathered_blocks(shape)
    yield from _gathered_ends(shape)


def held_weights(shape: RunShape) -> int:
    """Parameters whose weights one rank keeps between layers."""
    return _sharded(shape) if shape.mesh.zero >= 3 else _replicated(shape)


def held_gradients(shape: RunShape) -> int:
    """Parameters whose gradients one rank keeps until the update."""
    return _sharded(shape) if shape.mesh.zero >= 2 else _replicated(shape)


def _sharded(shape: RunShape) -> int:
    return parameters.parameters_per_rank(shape.model, shape.mesh.world)


def _replicated(shape: RunShape) -> int:
    mesh, model = shape.mesh, shape.model
    dense = parameters.dense_parameters_total(model) // mesh.tensor
    return -(-(dense + parameters.expert_parameters_total(model) // mesh.expert) // mesh.pipeline)


def gathered_block(shape: RunShape) -> int:
    """Parameters of the largest block that a rank holds beside its shards while the block is at work."""
    if not _gathers(shape, shape.mesh.world):
        return 0
    return _dense_part(shape) + (_local_experts(shape) if _gathers(shape, shape.mesh.world // shape.mesh.expert) else 0)


def _gathers(shape: RunShape, ranks: int) -> bool:
    """Whether FSDP2 over so many ranks holds copies of what is at work; one rank's own weights too, in another type."""
    return shape.mesh.zero >= 3 and (ranks > 1 or shape.dtypes.weight_bytes != shape.dtypes.activation_bytes)


def reduced_block(shape: RunShape) -> int:
    """Parameters of the largest block whose gradients are reduced over ranks."""
    return gathered_block(shape) if shape.mesh.zero >= 3 else (unsharded_block(shape) if shape.mesh.world > 1 else 0)


def unsharded_block(shape: RunShape) -> int:
    """Parameters of the largest block whose gradients exist whole on a rank while the block is at work."""
    return _dense_part(shape) + _local_experts(shape)


def _dense_part(shape: RunShape) -> int:
    model = shape.model
    count = parameters.moe_block_dense_parameters if model.num_moe_layers else parameters.dense_block_parameters
    return count(model) // shape.mesh.tensor


def _local_experts(shape: RunShape) -> int:
    model = shape.model
    if not model.num_moe_layers:
        return 0
    return model.num_experts // shape.mesh.expert * parameters.expert_parameters(model)


def _gradients(shape: RunShape) -> Iterator[Entry]:
    held = held_gradients(shape) * shape.dtypes.gradient_bytes
    if shape.batch.micro_batches > 1:
        yield Entry("gradients", GRADIENT_SHARDS, held, STEP)
        return
    yield Entry("gradients", GRADIENT_SHARDS, held, frozenset({Moment.UPDATE}))
    first, second = parameters.dense_block_parameters(shape.model), parameters.block_parameters(shape.model)
    yield Entry("gradients", EARLY_GRADIENTS, _early_gradients(shape, second), FIRST_BLOCKS - _DENSE)
    yield Entry("gradients", EARLY_GRADIENTS, _early_gradients(shape, first), _DENSE)


def _early_gradients(shape: RunShape, at_work: int) -> int:
    """Gradients of the blocks behind the second one; with two blocks, or on one rank, where nothing waits to be
    reduced, of those behind the first, which has `at_work` parameters."""
    model = shape.model
    ends = parameters.embedding_parameters(model) * (1 if model.tied else 2)
    blocks = parameters.total_parameters(model) - ends - model.extra_parameters
    waits = shape.mesh.world > 1 and model.num_layers > 2
    waiting = at_work + (parameters.block_parameters(model) if waits else 0)
    done = max(blocks - waiting, 0) if model.num_layers > 1 else 0
    return done * held_gradients(shape) // parameters.total_parameters(model) * shape.dtypes.gradient_bytes


def _gathered_blocks(shape: RunShape) -> Iterator[Entry]:
    """See Note [blocks in the backward]."""
    itemsize, layers = shape.dtypes.activation_bytes, shape.model.num_layers
    block = gathered_block(shape) * itemsize
    runs = BLOCK_BACKWARD - _DENSE | {Moment.FORWARD}
    yield Entry("gathered", "block at work, gathered", block, runs)
    if shape.model.num_dense_layers:
        dense = parameters.dense_block_parameters(shape.model) // shape.mesh.tensor * itemsize if block else 0
        yield Entry("gathered", "block at work, gathered", dense, _DENSE)
    if layers > 1:
        early = runs | {Moment.LOSS} if layers > 2 else runs - FIRST_BLOCKS | {Moment.LOSS}
        dense, experts = _neighbour(shape, gathered_block(shape))
        yield Entry("gathered", "next block, gathered early", dense * itemsize, early)
        yield Entry("gathered", EXPERTS_EARLY, experts * itemsize, early)
        yield from _reducing(shape)
    own = unsharded_block(shape) * itemsize
    yield Entry("gathered", "block's own gradients, unsharded", own, ATTENTION_BACKWARD)


# Note [blocks in the backward]
# FSDP2 gathers block i-1 while block i works, and keeps the reduce-scatter's input of block i+1 until block i is
# reduced. So two more blocks stand beside the one at work from the last but one block on, but not in the last block
# itself, and nothing is left to gather early in the first one. The first of them has one boundary less than the last
# block, which is taken off. Traced for 1 to 5 layers: 1, 2, 3, 3, 3 blocks beside the shards.


# Note [groups of experts]
# With expert parallelism, or with the dispatch flattener, the experts of a block are an FSDP2 group of their own, on
# the axis that complements the expert axis. FSDP2 then gathers early what comes next in turn, the dense part of block
# i-1 while the experts of block i work, and reduces the experts of block i+1 before its dense part: of a neighbour only
# the dense part is ever alive beside a block at work.


def _neighbour(shape: RunShape, block: int) -> tuple[int, int]:
    """Of a neighbouring block's `block` parameters the dense ones, and those of experts that come and go with it."""
    dense = min(block, _dense_part(shape))
    with_block = shape.mesh.expert == 1 or shape.mesh.zero < 3  # the note is FSDP2's
    return dense, block - dense if with_block else 0


def _reducing(shape: RunShape) -> Iterator[Entry]:
    what, itemsize = "last block's gradients, being reduced", shape.dtypes.gradient_bytes
    dense, experts = (part * itemsize for part in _neighbour(shape, reduced_block(shape)))
    yield Entry("gathered", what, dense, FIRST_BLOCKS)
    yield Entry("gathered", EXPERTS_REDUCED, experts, FIRST_BLOCKS)
    if shape.model.num_layers > 2:
        boundary = shape.tokens_per_rank * shape.model.hidden * shape.dtypes.activation_bytes
        rest = max(dense - boundary, 0)
        yield Entry("gathered", what, rest, BLOCK_BACKWARD - FIRST_BLOCKS)
        yield Entry(
            "gathered", EXPERTS_REDUCED, max(dense + experts - boundary, 0) - rest, BLOCK_BACKWARD - FIRST_BLOCKS
        )


def _gathered_ends(shape: RunShape) -> Iterator[Entry]:
    table = parameters.embedding_parameters(shape.model) // shape.mesh.tensor * shape.dtypes.activation_bytes
    gathered = table if _gathers(shape, shape.mesh.world) else 0
    yield Entry("gathered", HEAD_GATHERED, gathered, _MODEL_RUNS)
    if not shape.model.tied:
        yield Entry("gathered", "embedding, gathered", gathered, _MODEL_RUNS)
    yield Entry("gathered", HEAD_GRADIENT, table, BLOCK_BACKWARD)


def with_own_head(shape: RunShape) -> RunShape:
    """The run whose head is cut over P ranks instead of all W: each rank holds V H (1/P - 1/W) parameters more."""
    table = parameters.embedding_parameters(shape.model)
    more = table * (shape.mesh.world // shape.mesh.vocab - 1)
    return replace(shape, model=replace(shape.model, extra_parameters=shape.model.extra_parameters + more))


def own_head_entries(shape: RunShape) -> Iterator[Entry]:
    """The gradient of this rank's part of the head, there from the loss to the update. A float32 one is what the loss
    adds into; a narrower one is made of its sums when the loss is over."""
    part = parameters.embedding_parameters(shape.model) // shape.mesh.vocab * shape.dtypes.gradient_bytes
    wide = shape.dtypes.gradient_bytes >= SUM_BYTES
    yield Entry("gradients", EARLY_GRADIENTS, part, BLOCK_BACKWARD | ({Moment.LOSS} if wide else frozenset()))
