"""The tensors of one call on one rank, and the integers and tools that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from steppe.flatteners.vocab.objective import Objective
from steppe.flatteners.vocab.products import Products, accumulator_dtype
from steppe.flatteners.vocab.schedule import Head, Tiles
from steppe.flatteners.vocab.stats import RingStats
from steppe.flatteners.vocab.strip import StripSpace
from steppe.flatteners.vocab.travel import Wire

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """What is the same for forward and backward of one call; no tensors."""

    wire: Wire
    head: Head
    schedule: str
    tiles: Tiles
    objective: Objective
    stats: RingStats

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First vocabulary row of every rank's shard."""
        shards = self.head.shards
        return tuple(sum(shards[:rank]) for rank in range(len(shards)))

    @property
    def alpha(self) -> float:
        """What the GEMM multiplies by: strips hold u / cap until `cap_`."""
        return self.objective.logit_scale / (self.objective.softcap or 1.0)


@dataclass(frozen=True)
class Batch:
    """One rank's tensors: hidden [N,H], its vocabulary shard without padding [V_r,H], bias and class weights [V_r] in
    the statistics' dtype, labels [N]; `index` [n] lists the rows that count (None: all)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    labels: Tensor
    index: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Of statistics and accumulators."""
        return accumulator_dtype(self.hidden)

    def rows(self, start: int, stop: int) -> Tensor:
        """Hidden states of counted rows [stop-start,H]; a view where all rows count."""
        if self.index is None:
            return self.hidden[start:stop]
        return self.hidden.index_select(0, self.index[start:stop])

    def row_labels(self, start: int, stop: int) -> Tensor:
        if self.index is None:
            return self.labels[start:stop]
        return self.labels.index_select(0, self.index[start:stop])

    def shard(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """What travels of these vocabulary rows: weight, then bias and class weights where there are any."""
        return tuple(t[start:stop] for t in (self.weight, self.bias, self.class_weight) if t is not None)

    def land_rows(self, out: Tensor, start: int, stop: int, values: Tensor) -> None:
        """Write values of counted rows to their places in `out` [N,...], rounded once to its dtype."""
        if self.index is None:
            out[start:stop].copy_(values)
        else:
            out.index_copy_(0, self.index[start:stop], values.to(out.dtype))


@dataclass(frozen=True)
class Shard:
    """Some rows of the vocabulary, wherever they live: the first of them is row `start` of the whole."""

    weight: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    start: int

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], start: int, *, has_bias: bool) -> Shard:
        """From what travels (`Batch.shard`)."""
        weight, *vectors = tensors
        bias = vectors.pop(0) if has_bias else None
        return cls(weight, bias, vectors.pop(0) if vectors else None, start)

    def part(self, start: int, stop: int) -> Shard:
        vectors = (None if t is None else t[start:stop] for t in (self.bias, self.class_weight))
        return Shard(self.weight[start:stop], *vectors, self.start + start)


@dataclass(frozen=True)
class Tools:
    """What a call computes with: the memory of one strip, and the products."""

    space: StripSpace
    products: Products
    call: Call

    @classmethod
    def of(cls, call: Call, batch: Batch) -> Tools:
        sizes = call.tiles
        space = StripSpace(sizes.strip_bytes, sizes.scratch_bytes, call.objective, batch.hidden, batch.dtype)
        return cls(space, Products(batch.hidden, call.stats), call)

    def logits(self, strip: Tensor, rows: Tensor, shard: Shard) -> None:
        """Write logits, but for the cap, of operands that are ready to multiply."""
        self.products.logits(strip, rows, shard.weight, shard.bias, self.call.alpha)
