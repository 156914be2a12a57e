"""A block of rows against a block of vocabulary, strip by strip: folded into states, or turned into gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from steppe.flatteners.vocab.batch import Shard, Tools
from steppe.flatteners.vocab.objective import Slopes, merge

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Rows of hidden states, read tile by tile: `hidden(start, stop)` [R,H] and `labels(start, stop)` [R]."""

    length: int
    hidden: Callable[[int, int], Tensor]
    labels: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, hidden: Tensor, labels: Tensor) -> Rows:
        return cls(hidden.shape[0], lambda a, b: hidden[a:b], lambda a, b: labels[a:b])


@dataclass(frozen=True)
class Strip:
    """One strip of logits and where it lies in its blocks."""

    logits: Tensor
    rows: slice
    columns: slice
    operand: Tensor  # [R,H] as it is multiplied
    shard: Shard  # its weight as it is multiplied

    def own(self, rows: Rows) -> Tensor:
        """The labels, counted from the strip's first column."""
        return rows.labels(self.rows.start, self.rows.stop) - self.shard.start


def empty_strips(tools: Tools, rows: Rows, shard: Shard) -> Iterator[Strip]:
    """Uninitialised strips: vocabulary tiles outside (each is cast once), row tiles inside."""
    sizes = tools.call.tiles
    for first in range(0, shard.weight.shape[0], sizes.tile_vocab):
        last = min(first + sizes.tile_vocab, shard.weight.shape[0])
        part = shard.part(first, last)
        part = replace(part, weight=tools.products.operand(part.weight, "weight", sizes.tile_vocab))
        for start in range(0, rows.length, sizes.tile_tokens):
            stop = min(start + sizes.tile_tokens, rows.length)
            operand = tools.products.operand(rows.hidden(start, stop), "rows", sizes.tile_tokens)
            logits = tools.space.strip(stop - start, last - first)
            yield Strip(logits, slice(start, stop), slice(first, last), operand, part)


def strips(tools: Tools, rows: Rows, shard: Shard) -> Iterator[Strip]:
    """Strips of logits."""
    for strip in empty_strips(tools, rows, shard):
        tools.logits(strip.logits, strip.operand, strip.shard)
        tools.space.cap_(strip.logits)
        yield strip


def fold_block(tools: Tools, state: Tensor, rows: Rows, shard: Shard) -> None:
    """Fold all logits of the block into the states [R,K], in place."""
    for strip in strips(tools, rows, shard):
        met = tools.space.fold(strip.logits, strip.own(rows), strip.shard.start, strip.shard.class_weight)
        state[strip.rows] = merge(torch.stack((state[strip.rows], met)), tools.call.objective)


def gradient_block(
    tools: Tools, slopes: Callable[[int, int], Slopes], rows: Rows, shard: Shard, grad_hidden: Tensor | None,
    grad_weight: Tensor | None, grad_bias: Tensor | None,
) -> None:  # fmt: skip
    """Form the gradients of all logits of the block again and add their products to what is given."""
    for strip in strips(tools, rows, shard):
        row_slopes = slopes(strip.rows.start, strip.rows.stop)
        tools.space.gradient_(strip.logits, strip.own(rows), row_slopes, strip.shard.class_weight)
        if grad_bias is not None:
            grad_bias[strip.columns] += strip.logits.sum(0)
        add_products(tools, strip, grad_hidden, grad_weight)


def add_products(tools: Tools, strip: Strip, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> None:
    """Add the products of a strip that holds the gradient of its logits."""
    if grad_weight is not None:
        tools.products.add_weight(grad_weight[strip.columns], strip.logits, strip.operand)
    if grad_hidden is not None:
        tools.products.add_hidden(grad_hidden[strip.rows], strip.logits, strip.shard.weight)
