"""Log-sum-exp, softmax-weighted sums and top-k over a sharded axis against whole programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.reductions import ring_logsumexp, ring_softmax_matmul, ring_topk
from steppe.runtime import collectives
from tests.flatteners.vocab.programs import Spec, make, spans
from tests.support.exactness import assert_reordered
from tests.support.peaks import measured_peak
from tests.support.ranks import run_ranks

SHARES = {1: ((9,), (50,)), 2: ((4, 7), (33, 17)), 3: ((5, 0, 3), (0, 31, 19)), 4: ((1, 2, 0, 4), (20, 0, 1, 29))}
POLICY = VocabPolicy("weights", tile_tokens=3, tile_vocab=8, num_chunks=2)
K = 4


def whole(name: str, x: torch.Tensor, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    if name == "logsumexp":
        return torch.logsumexp(logits, -1, keepdim=True)
    if name == "softmax_matmul":
        return torch.softmax(logits, -1).to(x.dtype) @ values
    return logits.topk(K, -1).values


def ring(name: str, x: torch.Tensor, weight: torch.Tensor, values: torch.Tensor, group: Any) -> torch.Tensor:
    if name == "logsumexp":
        return ring_logsumexp(x, weight, group=group, policy=POLICY)[..., None]
    if name == "softmax_matmul":
        return ring_softmax_matmul(x, weight, values, group=group, policy=POLICY)
    return ring_topk(x, weight, K, group=group, policy=POLICY)[0]


def check_reduction(rank: int, world_size: int) -> None:
    rows, shards = SHARES[world_size]
    group: Any = collectives.world() if world_size > 1 else None
    own, shard = spans(rows)[rank], spans(shards)[rank]
    for dtype in ("float64", "float32", "bfloat16"):
        tensors = make(Spec(rows=rows, shards=shards, width=6, dtype=dtype))
        values = torch.randn(50, 5, generator=torch.Generator().manual_seed(4)).to(tensors.weight.dtype)
        for name in ("logsumexp", "softmax_matmul", "topk"):
            upstream = torch.randn(sum(rows), 5, generator=torch.Generator().manual_seed(5))
            results = []
            for wide in (False, True):
                leaves = [
                    (t.double() if wide else t.clone()).requires_grad_()
                    for t in (tensors.hidden, tensors.weight, values)
                ]
                out = whole(name, *leaves)
                grads = torch.autograd.grad(out, leaves, upstream[:, : out.shape[1]].to(out.dtype), allow_unused=True)
                results.append((out, *grads))
            plain, truth = results
            mine = [t.clone().requires_grad_() for t in (tensors.hidden[own], tensors.weight[shard], values[shard])]
            out = ring(name, *mine, group)
            grads = torch.autograd.grad(out, mine, upstream[own, : out.shape[1]].to(out.dtype), allow_unused=True)
            told = f"{name} {dtype} rank {rank} of {world_size}"
            for found, near, true, part in zip((out, *grads), plain, truth, (own, own, shard, shard), strict=True):
                assert (found is None) == (near is None), told
                if found is not None:
                    assert_reordered(found, near[part], true[part], length=50, what=told)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_reductions_equal_the_whole_programs(ranks: int) -> None:
    run_ranks(check_reduction, ranks)


def check_rows(rank: int, world_size: int) -> None:
    tensors = make(Spec(rows=(5, 5), shards=(20, 30)))
    own, shard = spans((5, 5))[rank], spans((20, 30))[rank]
    x = tensors.hidden[own].view(1, 5, -1)
    found, rows = ring_topk(x, tensors.weight[shard], K, group=collectives.world(), policy=POLICY)
    assert found.shape == rows.shape == (1, 5, K)
    truth = (x @ tensors.weight.T).topk(K, -1)
    assert torch.equal(rows, truth.indices)
    assert (found.diff(dim=-1) <= 0).all()


def test_topk_names_rows_of_the_whole_axis() -> None:
    run_ranks(check_rows, 2)


def test_a_reduction_holds_strips_not_the_axis() -> None:
    x, weight, values = torch.randn(64, 8), torch.randn(6000, 8), torch.randn(6000, 8)
    policy = VocabPolicy("weights", budget_bytes=64 * 1024)
    for fn in (
        lambda: ring_logsumexp(x, weight, policy=policy),
        lambda: ring_topk(x, weight, K, policy=policy),
        lambda: ring_softmax_matmul(x, weight, values, policy=policy),
    ):
        fn()
        assert 64 * 1024 <= measured_peak(fn) < 64 * 6000 * 4 / 2
