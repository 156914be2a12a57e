"""The vocabulary-parallel lookup: token ids go to the rank that owns their row, rows come back.

No [V,H] is gathered and no dense [V,H] gradient is made: a rank holds its own rows and their gradient. What travels is
each token's row once each way, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from steppe.core.errors import Refusal, ShapeError
from steppe.core.units import MiB
from steppe.flatteners.vocab.agree import agree, check_labels
from steppe.flatteners.vocab.checks import check_weight
from steppe.flatteners.vocab.functions import first_derivative_only
from steppe.flatteners.vocab.schedule import chunk_bounds, num_chunks
from steppe.runtime import collectives, scopes
from steppe.runtime.collectives import Group

Tensor = torch.Tensor
CHUNK_BYTES = 16 * MiB  # of rows that one rank may have to serve at a time


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, *, group: Group = None, padding_idx: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:  # fmt: skip
    """Rows of a table sharded over the ranks of `group`: ids [...] -> [...,H]; every rank brings its own ids.

    `weight` [V_r,H] is this rank's rows, in rank order. `padding_idx` gets no gradient, as in torch.
    Peak: 2 x P x chunk_tokens x H served and returned, plus two integers a token; the gradient's float32 accumulator
    [V_r,H] where the weight is narrower. `chunk_tokens` follows from 16 MiB a rank by default.
    Exactness: bitwise forward; gradient reordered over the tokens of a row.
    Raises: ShapeError; DataError for an id outside the vocabulary, the same on every rank, before anything is sent.
    """
    refusal = _refusal(ids, weight)
    flat = ids.reshape(-1).long() if refusal is None else torch.zeros(0, dtype=torch.int64)
    kind = None if refusal is not None else (weight.shape[1], weight.dtype, weight.requires_grad)
    agreed = agree(
        flat, torch.ones_like(flat, dtype=torch.bool), shard_rows=weight.shape[0] if refusal is None else 0,
        budget_bytes=1, refusal=refusal, group=group, must_match={
            "width, dtype and requires_grad of the weight": kind,
            "padding_idx, chunk_tokens and grad mode": (padding_idx, chunk_tokens, torch.is_grad_enabled()),
        },
    )  # fmt: skip
    check_labels(agreed, sum(agreed.shards), None, "token id")
    ranks = len(agreed.shards)
    chunk = chunk_tokens or max(1, CHUNK_BYTES // (ranks * weight.shape[1] * weight.element_size()))
    routes = _Routes.of(flat, agreed.shards, agreed.counted, chunk, group)
    return _Lookup.apply(routes, flat, weight, padding_idx).view(*ids.shape, weight.shape[1])


def _refusal(ids: Tensor, weight: Tensor) -> Refusal | None:
    try:
        check_weight(weight)
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                "token ids", got=getattr(ids, "dtype", type(ids).__name__), allowed="an int64 or int32 tensor",
                remedy="give the tokenizer's ids",
            )  # fmt: skip
    except Refusal as raised:
        return raised
    return None


@dataclass(frozen=True)
class _Hop:
    """One chunk of this rank's ids: their order by owner, and the rows that go each way."""

    order: Tensor  # positions in the flat ids, sorted by owner
    asked: tuple[int, ...]  # ids that this rank asks of each rank
    served: tuple[int, ...]  # ids that each rank asks of this rank


@dataclass(frozen=True)
class _Routes:
    """Which ids go where, chunk by chunk; the table of counts [P,chunks,P] is gathered once."""

    group: Group
    start: int  # first row of this rank's shard
    chunk: int
    num_ids: int
    owners: Tensor
    table: list[list[list[int]]]

    @classmethod
    def of(cls, ids: Tensor, shards: tuple[int, ...], lengths: tuple[int, ...], chunk: int, group: Group) -> _Routes:
        ranks, steps = len(shards), num_chunks(lengths, chunk)
        ends = torch.tensor(shards, device=ids.device).cumsum(0)
        owners = torch.bucketize(ids, ends, right=True)
        places = torch.arange(ids.numel(), device=ids.device) // chunk * ranks + owners
        counts = torch.bincount(places, minlength=steps * ranks).view(steps, ranks)
        table = collectives.all_gather(counts, group).tolist()
        return cls(group, sum(shards[: collectives.rank(group)]), chunk, ids.numel(), owners, table)

    def hops(self) -> Iterator[_Hop]:
        me = collectives.rank(self.group)
        for step in range(len(self.table[0])):
            start, stop = chunk_bounds(self.num_ids, self.chunk, step)
            order = start + torch.argsort(self.owners[start:stop], stable=True)
            yield _Hop(order, tuple(self.table[me][step]), tuple(rank[step][me] for rank in self.table))

    def ask(self, hop: _Hop, tensor: Tensor) -> Tensor:
        """Rows of `tensor` by position -> rows at their owners."""
        arrived = tensor.new_empty((sum(hop.served), *tensor.shape[1:]))
        sent = tensor.index_select(0, hop.order)
        collectives.all_to_all(arrived, sent, hop.served, hop.asked, self.group, "token ids to their owners").wait()
        return arrived

    def answer(self, hop: _Hop, rows: Tensor, out: Tensor) -> None:
        """Rows at their owners -> their places in `out`."""
        arrived = rows.new_empty((sum(hop.asked), *rows.shape[1:]))
        collectives.all_to_all(arrived, rows, hop.asked, hop.served, self.group, "embedding rows").wait()
        out.index_copy_(0, hop.order, arrived)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routes: _Routes, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:  # type: ignore[override]
        ctx.routes, ctx.padding_idx, ctx.kind = routes, padding_idx, (weight.shape, weight.dtype)
        ctx.save_for_backward(ids)
        with scopes.label("vocab"):
            out = weight.new_empty((ids.numel(), weight.shape[1]))
            for hop in routes.hops():
                asked = routes.ask(hop, ids) - routes.start
                routes.answer(hop, weight.index_select(0, asked), out)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:  # type: ignore[override]
        (ids,), routes = ctx.saved_tensors, ctx.routes
        shape, dtype = ctx.kind
        with scopes.label("vocab"):
            total = grad.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
            for hop in routes.hops():
                asked = routes.ask(hop, ids)
                rows = routes.ask(hop, grad).to(total.dtype)
                if ctx.padding_idx is not None:
                    rows.masked_fill_((asked == ctx.padding_idx)[:, None], 0)
                total.index_add_(0, asked - routes.start, rows)
        return None, None, total.to(dtype), None
