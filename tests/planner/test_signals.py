"""Failure signals that no toy run shows by itself, forced through the figures they are read from."""

from __future__ import annotations

from typing import Any

import pytest

from steppe.flatteners.dispatch import telemetry
from steppe.flatteners.optimizer import attach as optimizer
from steppe.flatteners.vocab import attach as vocab
from steppe.flatteners.vocab.stats import RingStats


def dispatch_says(num_ranks: int = 2, **figures: Any) -> tuple[str, ...]:
    layer = telemetry.LayerStats(layer="layers.0", **figures)
    return telemetry.diagnose({"layers": [layer], "num_ranks": num_ranks, "ties_pinned": True})


def test_spilling_that_does_not_help_is_told_with_both_loads() -> None:
    (said,) = dispatch_says(transfers=5, load_before=3.0, load_after=2.95)
    assert "5 spilled experts brought max/mean load from 3.00 only to 2.95" in said
    assert "lower max_load" in said
    assert dispatch_says(transfers=5, load_before=3.0, load_after=1.1) == ()


def test_a_cap_below_what_hides_the_exchange_is_told_on_several_ranks_only() -> None:
    figures = {"exchange_ms": 20.0, "compute_ms": 10.0, "chunk_rows": 64, "most_routes": 4096}
    assert "the cap of 64 rows is too small to hide it" in dispatch_says(**figures)[0]
    assert dispatch_says(1, **figures) == ()


def test_a_cap_no_smaller_than_the_routes_flattens_nothing() -> None:
    (said,) = dispatch_says(forwards=1, backwards=1, chunk_rows=4096, most_routes=4096)
    assert "everything is one chunk and nothing is flattened" in said


def test_state_that_crosses_sockets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "numa_nodes", lambda: ((0, 1), (2, 3)))
    figures = {"kernel": "compiled (x86-64-v4)", "device": "cpu", "streams": 1}
    (said,) = optimizer.diagnose({**figures, "cpus": (0, 1, 2, 3)})
    assert "crosses sockets" in said
    assert optimizer.diagnose({**figures, "cpus": (0, 1)}) == ()
    assert optimizer.diagnose({**figures, "streams": 2, "cpus": (0, 1, 2, 3)}) == ()


def test_a_ring_bound_by_synchronisation_is_told_and_one_that_computes_is_not() -> None:
    (said,) = vocab.diagnose(RingStats(calls=1, busy_s=10.0, wait_s=6.0, tile_tokens=512, rows=1000))
    assert "bound by synchronisation: 60%" in said
    assert vocab.diagnose(RingStats(calls=1, busy_s=10.0, wait_s=1.0, tile_tokens=512, rows=1000)) == ()
