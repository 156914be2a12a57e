"""The `local` (one rank) and `one_pass` (P ranks) schedules: gradients formed at once; 3 matrix passes.

Blocks of B tokens of every rank meet all shards together: a rank multiplies P*B rows by its shard, the ranks share the
row states, and with those the logits become their own gradient in place. The next block travels while this one is
computed, and the gradients of a block's hidden states go home while the next one is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import torch

from steppe.flatteners.vocab.batch import Batch, Call, Shard, Tools
from steppe.flatteners.vocab.objective import empty_state, merge, row_slopes
from steppe.flatteners.vocab.schedule import chunk_bounds, num_chunks
from steppe.runtime.collectives import Pending

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Block:
    """Rows of every rank, one after the other: `spans[r]` are rank r's. `mine` are this rank's counted rows."""

    hidden: Tensor
    labels: Tensor
    spans: tuple[tuple[int, int], ...]
    mine: tuple[int, int]
    turn: int


class _Meeting:
    """Blocks of all ranks, the next one on its way while the caller computes. Peak: min(P, 2) x [P*B,H] and labels."""

    def __init__(self, call: Call, batch: Batch) -> None:
        self._call, self._batch = call, batch
        most, width = call.wire.ranks * call.tiles.tile_tokens, batch.hidden.shape[1]
        turns = range(min(2, call.wire.ranks))
        self._hidden = [batch.hidden.new_empty((most, width)) for _ in turns]
        self._labels = [batch.labels.new_empty(most) for _ in turns]

    def blocks(self) -> Iterator[_Block]:
        steps = num_chunks(self._call.head.rows, self._call.tiles.tile_tokens)
        following, posted = iter(range(steps)), deque[tuple[_Block, Pending]]()
        for _ in range(steps):
            room = len(self._hidden) - len(posted)  # the caller is done with the block before
            posted.extend(self._post(step) for step in islice(following, room))
            block, pending = posted.popleft()
            self._call.wire.wait(pending)
            yield block

    def _post(self, step: int) -> tuple[_Block, Pending]:
        wire, sizes = self._call.wire, self._call.tiles
        bounds = [chunk_bounds(rows, sizes.tile_tokens, step) for rows in self._call.head.rows]
        spans = tuple(pairwise(accumulate((stop - start for start, stop in bounds), initial=0)))
        turn = step % len(self._hidden)
        places = [(self._hidden[turn][a:b], self._labels[turn][a:b]) for a, b in spans]
        own = places[wire.me]
        own[0].copy_(self._batch.rows(*bounds[wire.me]))
        own[1].copy_(self._batch.row_labels(*bounds[wire.me]))
        others = [peer for peer in range(wire.ranks) if peer != wire.me]
        sends = [(tensor, peer) for tensor in own for peer in others]
        receives = [(places[peer][i], peer) for i in (0, 1) for peer in others]
        pending = wire.post(sends, receives, len(others), "blocks of all ranks")
        total = spans[-1][1]
        block = _Block(self._hidden[turn][:total], self._labels[turn][:total], spans, bounds[wire.me], step)
        return block, pending


class _Return:
    """Gradients of a block's hidden states, partial on every rank, summed at their owners in rank order.

    Peak: min(P, 2) x [P*B,H] leaving and [P-1,B,H] arriving, in the accumulator's dtype.
    """

    def __init__(self, call: Call, batch: Batch, out: Tensor) -> None:
        self._wire, self._batch, self._out = call.wire, batch, out
        block, width = call.tiles.tile_tokens, batch.hidden.shape[1]
        ranks = call.wire.ranks
        self._partial = [
            out.new_empty((ranks * block, width), dtype=batch.dtype) for _ in range(min(2, ranks))
        ]  # fmt: skip
        self._arriving = out.new_empty((ranks - 1, block, width), dtype=batch.dtype)
        self._underway: tuple[Pending, _Block, list[Tensor]] | None = None

    def room(self, block: _Block) -> Tensor:
        """Where this block's partial gradients go; zeroed."""
        if len(self._partial) == 1:
            self.settle()
        return self._partial[block.turn % len(self._partial)][: block.hidden.shape[0]].zero_()

    def send(self, block: _Block, partial: Tensor) -> None:
        self.settle()
        wire = self._wire
        others = [peer for peer in range(wire.ranks) if peer != wire.me]
        a, b = block.spans[wire.me]
        arriving = [buffer[: b - a] for buffer in self._arriving]
        sends = [(partial[slice(*block.spans[peer])], peer) for peer in others]
        pending = wire.post(sends, list(zip(arriving, others, strict=True)), len(sends), "gradients going home")
        self._underway = pending, block, [partial[a:b], *arriving]

    def settle(self) -> None:
        """Wait for what is underway and land it; call once more after the last block."""
        if self._underway is None:
            return
        pending, block, (own, *arrived) = self._underway
        self._underway = None
        self._wire.wait(pending)
        for partial in arrived:
            own.add_(partial)
        self._batch.land_rows(self._out, *block.mine, own)


@dataclass(frozen=True)
class Gradients:
    """Where the gradients go: hidden [N,H], weight [V_r,H] and bias [V_r] in the accumulator's dtype; None: frozen."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run(call: Call, batch: Batch, upstream: float, grads: Gradients | None) -> Tensor:
    """[n,K]: states of this rank's counted rows; with `grads`, also the gradients of `upstream` x the summed loss."""
    tools = Tools.of(call, batch)
    shard = Shard(batch.weight, batch.bias, batch.class_weight, call.starts[call.wire.me])
    state = empty_state(call.head.rows[call.wire.me], call.objective, batch.hidden, batch.dtype)
    back = None if grads is None or grads.hidden is None else _Return(call, batch, grads.hidden)
    for block in _Meeting(call, batch).blocks():
        rows = tools.products.operand(block.hidden, "rows", call.wire.ranks * call.tiles.tile_tokens)
        strip = tools.space.strip(rows.shape[0], shard.weight.shape[0])
        for columns, part in _parts(tools, shard):
            tools.logits(strip[:, columns], rows, part)
        tools.space.cap_(strip)
        met = tools.space.fold(strip, block.labels - shard.start, shard.start, shard.class_weight)
        whole = merge(call.wire.gather(met), call.objective)
        state[slice(*block.mine)] = whole[slice(*block.spans[call.wire.me])]
        if grads is not None:
            _gradients(tools, block, strip, whole, rows, shard, upstream, grads, back)
    if back:
        back.settle()
    return state


def _columns(tools: Tools, shard: Shard) -> Iterator[tuple[slice, Shard]]:
    """The shard by tiles of vocabulary; one tile where nothing must be cast or added."""
    step = tools.call.tiles.tile_vocab
    for start in range(0, shard.weight.shape[0], step):
        stop = min(start + step, shard.weight.shape[0])
        yield slice(start, stop), shard.part(start, stop)


def _parts(tools: Tools, shard: Shard) -> Iterator[tuple[slice, Shard]]:
    """The same, each ready to multiply."""
    for columns, part in _columns(tools, shard):
        weight = tools.products.operand(part.weight, "weight", tools.call.tiles.tile_vocab)
        yield columns, replace(part, weight=weight)


def _gradients(
    tools: Tools, block: _Block, strip: Tensor, whole: Tensor, rows: Tensor, shard: Shard, upstream: float,
    grads: Gradients, back: _Return | None,
) -> None:  # fmt: skip
    """Turn the strip into its gradient and add the products of it."""
    slopes = row_slopes(whole, tools.call.objective, loss=torch.full_like(whole[:, 0], upstream))
    tools.space.gradient_(strip, block.labels - shard.start, slopes, shard.class_weight)
    if grads.weight is not None:
        for columns, _ in _columns(tools, shard):
            tools.products.add_weight(grads.weight[columns], strip[:, columns], rows)
    if grads.bias is not None:
        grads.bias.add_(strip.sum(0))
    if back is not None:
        partial = back.room(block)
        for columns, part in _parts(tools, shard):
            tools.products.add_hidden(partial, strip[:, columns], part.weight)
        back.send(block, partial)
