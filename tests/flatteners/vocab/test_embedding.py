"""The vocabulary-parallel lookup against torch's embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steppe.flatteners.vocab.embedding import vocab_parallel_embedding
from steppe.runtime import collectives
from tests.flatteners.vocab.programs import spans
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.peaks import measured_peak
from tests.support.ranks import run_ranks

SHARES = {1: ((11,), (20,)), 2: ((7, 5), (3, 17)), 3: ((0, 9, 4), (8, 0, 12)), 4: ((3, 0, 5, 1), (1, 0, 0, 19))}


def check_lookup(rank: int, world_size: int) -> None:
    rows, shards = SHARES[world_size]
    group: Any = collectives.world() if world_size > 1 else None
    own, shard = spans(rows)[rank], spans(shards)[rank]
    for dtype in (torch.float32, torch.bfloat16):
        for chunk, padding_idx in ((None, None), (2, 13)):
            ids = torch.randint(0, 20, (sum(rows),), generator=torch.Generator().manual_seed(1))
            table = torch.randn(20, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
            upstream = torch.randn(sum(rows), 4, generator=torch.Generator().manual_seed(3)).to(dtype)
            plain = table.clone().requires_grad_()
            looked_up = F.embedding(ids, plain, padding_idx=padding_idx)
            truth = table.double().requires_grad_()
            (true_grad,) = torch.autograd.grad(F.embedding(ids, truth, padding_idx), truth, upstream.double())
            (plain_grad,) = torch.autograd.grad(looked_up, plain, upstream)
            mine = table[shard].clone().requires_grad_()
            found = vocab_parallel_embedding(
                ids[own].view(1, -1), mine, group=group, padding_idx=padding_idx, chunk_tokens=chunk
            )
            assert_bitwise(found[0], looked_up[own], "rows")
            (grad,) = torch.autograd.grad(found, mine, upstream[own][None])
            assert_reordered(grad, plain_grad[shard], true_grad[shard], length=sum(rows), what=f"{dtype} {chunk}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_have_the_bits_of_torchs_embedding_and_gradients_its_sums(ranks: int) -> None:
    run_ranks(check_lookup, ranks)


def served_by_one_rank(rank: int, world_size: int) -> int:
    ids, table = torch.zeros(4000, dtype=torch.int64), torch.randn(2, 64)
    return measured_peak(
        lambda: vocab_parallel_embedding(ids, table, group=collectives.world(), chunk_tokens=100)
    )  # fmt: skip


def test_tokens_that_all_live_on_one_rank_are_served_in_chunks() -> None:
    row = 64 * 4
    for measured in run_ranks(served_by_one_rank, 2):
        output, served = 4000 * row, 2 * 100 * row
        routes = 4000 * 8 * 6  # integers of a token while the routes are made
        assert output <= measured <= output + 2 * served + routes
