"""Exchanges at the worst moments, ranks that fail, input that is wrong on one rank only."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from steppe.core.errors import CollectiveTimeout, DataError, ShapeError
from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.ring import ring_dtp_loss
from steppe.flatteners.vocab.stats import RingStats
from steppe.runtime import collectives
from tests.flatteners.vocab.programs import Spec, make, ours, spans
from tests.support.exactness import assert_bitwise
from tests.support.ranks import RankFailure, run_ranks

UNEVEN = Spec(
    rows=(7, 0, 12), shards=(30, 41, 5), bias=True, sizes={"tile_tokens": 3, "tile_vocab": 4, "num_chunks": 3}
)


class _AtTheLastMoment:
    """Posts its messages only when it is waited for; what is to be received is NaN until then."""

    def __init__(self, post: Any, sends: Any, receives: Any, group: Any, what: str) -> None:
        for tensor, _ in receives:
            tensor.view(torch.uint8).fill_(0xFF) if tensor.is_floating_point() else tensor.fill_(2**40)
        self._start = lambda: post(sends, receives, group, what).wait()

    def wait(self, timeout_s: float | None = None) -> None:
        start, self._start = self._start, lambda: None
        start()


def _randomly_late(post: Any, dice: random.Random) -> Any:
    def exchange(sends: Any, receives: Any, group: Any, what: str = "") -> Any:
        time.sleep(dice.choice((0, 0, 0.002, 0.01)))
        return post(sends, receives, group, what)

    return exchange


def check_disturbed(rank: int, world_size: int) -> None:
    post, group = collectives.exchange, collectives.world()
    for schedule in ("one_pass", "weights", "activations"):
        spec = UNEVEN.but(schedule=schedule)
        tensors = make(spec)
        quiet, quiet_grads = ours(spec, tensors, rank, group)
        disturbances = [lambda *message: _AtTheLastMoment(post, *message)]
        disturbances += [_randomly_late(post, random.Random(10 * seed + rank)) for seed in range(4)]
        for disturbed in disturbances:
            collectives.exchange = disturbed
            try:
                values, grads = ours(spec, tensors, rank, group)
            finally:
                collectives.exchange = post
            assert_bitwise(values["loss"].detach(), quiet["loss"].detach(), schedule)
            for grad, expected in zip(grads, quiet_grads, strict=True):
                assert_bitwise(grad, expected, schedule)


def test_late_exchanges_and_poisoned_buffers_change_no_bit() -> None:
    run_ranks(check_disturbed, 3)


def check_graphs(rank: int, world_size: int) -> None:
    """Two backwards through a kept graph, no second one through a freed one, none twice differentiable; no grad."""
    group = collectives.world()
    for schedule in ("one_pass", "weights", "activations"):
        spec = UNEVEN.but(schedule=schedule)
        made, rows, shard = make(spec), spans(spec.rows)[rank], spans(spec.shards)[rank]
        leaves = [t.clone().requires_grad_() for t in (made.hidden[rows], made.weight[shard], made.bias[shard])]
        policy = VocabPolicy(schedule, **spec.sizes)

        def loss(leaves: Any = leaves, labels: Any = made.labels[rows], policy: VocabPolicy = policy) -> torch.Tensor:
            return ring_dtp_loss(leaves[0], leaves[1], labels, bias=leaves[2], group=group, policy=policy)

        kept = loss()
        with torch.no_grad():
            assert_bitwise(loss(), kept.detach(), f"{schedule} without gradients")
        first = torch.autograd.grad(kept, leaves, retain_graph=True)
        once = [grad.clone() for grad in first]
        second = torch.autograd.grad(kept, leaves, torch.tensor(0.25))
        for grad, again, before in zip(first, second, once, strict=True):
            assert_bitwise(grad, before, f"{schedule}: the first gradient after the second backward")
            assert_bitwise(again, before / 4, f"{schedule}: the second backward")
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(kept, leaves)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(loss(), leaves, create_graph=True)


def test_graphs_used_twice_and_forwards_without_gradients_hold_over_ranks() -> None:
    run_ranks(check_graphs, 3)


def fail_before_the_ring(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("the loader of rank 1 failed")
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    ring_dtp_loss(hidden, weight, torch.zeros(4, dtype=torch.int64), group=collectives.world())


def test_a_rank_that_fails_before_the_ring_lets_the_others_fail_with_a_message() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="one of them failed or never came") as failure:
        run_ranks(fail_before_the_ring, 2, timeout_s=20.0)
    assert CollectiveTimeout.__name__ in str(failure.value)
    assert time.monotonic() - started < 60.0


def refuse_on_one_rank(rank: int, world_size: int) -> tuple[str, str, int]:
    stats, group = RingStats(), collectives.world()
    hidden, weight, labels = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64)
    bad_labels = labels.clone()
    if rank == 1:
        bad_labels[2] = 10
    with pytest.raises(DataError) as label_error:
        ring_dtp_loss(hidden, weight, bad_labels, group=group, stats=stats)
    with pytest.raises(ShapeError) as shape_error:
        ring_dtp_loss(hidden, weight, labels if rank == 0 else labels[1:], group=group, stats=stats)
    ring_dtp_loss(hidden, weight, labels, group=group)  # the group is still in step
    return str(label_error.value), str(shape_error.value), stats.payload_bytes + stats.side_bytes


def test_bad_input_on_one_rank_is_refused_on_all_before_the_first_send() -> None:
    (label, shape, sent), (label_of_1, shape_of_1, sent_of_1) = run_ranks(refuse_on_one_rank, 2)
    assert label == label_of_1
    assert "10 on rank 1" in label
    assert "rank 1 refused" in shape
    assert "(3,)" in shape
    assert "(3,)" in shape_of_1
    assert sent == sent_of_1 == 0


def differ_between_ranks(rank: int, world_size: int) -> str:
    hidden, weight = torch.randn(4, 3, requires_grad=rank == 0), torch.randn(5, 3)
    with pytest.raises(Exception, match="different values on different ranks") as refused:
        ring_dtp_loss(hidden, weight, torch.zeros(4, dtype=torch.int64), group=collectives.world())
    with pytest.raises(Exception, match="different values on different ranks"):
        ring_dtp_loss(
            hidden.detach(), weight, torch.zeros(4, dtype=torch.int64), group=collectives.world(), z_loss=0.1 * rank
        )
    return str(refused.value)


def test_ranks_that_are_called_differently_are_told_so() -> None:
    first, second = run_ranks(differ_between_ranks, 2)
    assert first == second
    assert "requires_grad" in first
