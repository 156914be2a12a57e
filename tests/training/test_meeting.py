"""Ranks that start meet those that start with them, not what an attempt before them left behind."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from steppe.core.errors import CollectiveTimeout
from steppe.training.meeting import agree


def _attempt(store: dist.Store, world: int, late: int) -> list[str]:
    words = [""] * world

    def start(rank: int) -> None:
        words[rank] = agree(store, rank, world, 10.0)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(world)]
    for rank in sorted(range(world), key=lambda rank: (rank == late, rank)):
        threads[rank].start()
    for thread in threads:
        thread.join(timeout=20)
    return words


def test_every_attempt_agrees_on_a_word_of_its_own_whoever_comes_last() -> None:
    store, seen = dist.HashStore(), set()
    store.set_timeout(timedelta(seconds=10))
    for late in (0, 1, 2):
        store.set("steppe/hello/1", "left by a rank that died before it was answered")
        words = _attempt(store, 3, late)
        assert len(set(words)) == 1 and words[0]
        seen.add(words[0])
    assert len(seen) == 3


def test_rank_zero_says_whom_it_has_not_met() -> None:
    with pytest.raises(CollectiveTimeout, match=r"has not met ranks \[1, 2\]"):
        agree(dist.HashStore(), 0, 3, 0.05)


def test_one_rank_meets_itself() -> None:
    assert agree(dist.HashStore(), 0, 1, 0.0)
