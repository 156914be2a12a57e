"""Buckets, shares, order and constants, as properties over integers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.flatteners.optimizer.schedule import (
    ALIGN,
    SQUARE_BLOCK,
    by_node,
    clip_factor,
    cpu_share,
    cut,
    device_slots,
    fold,
    num_streams,
    order,
    pipeline_seconds,
    ring_slot_bytes,
    shares,
    square_shares,
)  # fmt: skip

lengths = st.lists(st.integers(0, 3000), max_size=12)


@given(lengths, st.integers(1, 4000))
def test_every_element_lies_in_exactly_one_piece(sizes: list[int], capacity: int) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}
    for bucket in cut(sizes, capacity):
        assert bucket.length <= max(ALIGN, capacity)
        assert bucket.pieces, "no empty buckets"
        ends = [0, *(p.offset + p.length for p in bucket.pieces)]
        assert all(p.offset >= end and p.offset % ALIGN == 0 for p, end in zip(bucket.pieces, ends))
        for piece in bucket.pieces:
            seen.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    for tensor, length in enumerate(sizes):
        ranges = seen.get(tensor, [])
        assert [r[0] for r in ranges] == [0, *(r[1] for r in ranges[:-1])] if length else ranges == []
        assert not length or ranges[-1][1] == length


@given(lengths, st.integers(64, 4000))
def test_only_the_last_bucket_has_room_left(sizes: list[int], capacity: int) -> None:
    usable = capacity - capacity % ALIGN
    assert all(bucket.length == usable for bucket in cut(sizes, capacity)[:-1])


@given(lengths, st.integers(64, 4000), st.integers(1, 7))
def test_threads_share_a_bucket_without_gap_or_overlap(sizes: list[int], capacity: int, threads: int) -> None:
    for bucket in cut(sizes, capacity):
        dealt = shares(bucket, threads)
        assert len(dealt) <= threads
        pieces = sorted((p.tensor, p.start, p.stop) for share in dealt for p in share)
        assert sum(stop - start for _, start, stop in pieces) == sum(p.length for p in bucket.pieces)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(pieces))


@given(st.integers(0, 30), st.integers(1, 6))
def test_the_order_never_waits_for_what_is_not_yet_enqueued(buckets: int, slots: int) -> None:
    at = {(o.stage, o.bucket): i for i, o in enumerate(order(buckets, slots))}
    assert len(at) == 3 * buckets
    for bucket in range(buckets):
        assert at["to_host", bucket] < at["update", bucket] < at["to_device", bucket]
        if bucket >= slots:
            assert at["update", bucket - slots] < at["to_host", bucket]
            assert at["to_device", bucket - slots] < at["update", bucket]


@given(st.integers(1, 40), st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10))
def test_two_slots_hide_all_but_the_slowest_stage(buckets: int, down: float, work: float, up: float) -> None:
    taken = pipeline_seconds([(down, work, up)] * buckets, slots=2)
    assert taken <= (buckets - 1) * max(down, work, up) + down + work + up + 1e-9 * buckets
    assert taken >= buckets * max(down, work, up)


def test_the_constants_are_adamws_with_both_corrections_folded_in() -> None:
    step = fold(1e-3, (0.9, 0.99), 1e-8, 0.1, 3, scale=0.5, maximize=True)
    root = math.sqrt(1 - 0.99**3)
    m, v = 0.3, 0.04
    folded = step.rate * m / (math.sqrt(v) + step.eps)
    assert folded == pytest.approx(-1e-3 / (1 - 0.9**3) * m / (math.sqrt(v) / root + 1e-8), rel=1e-15)
    assert (step.scale, step.shrink, step.b2) == (-0.5, 1e-3 * 0.1, 0.99)


@pytest.mark.parametrize(("norm", "limit", "factor"), [(0.5, 1.0, 1.0), (2.0, None, 1.0), (5.0, math.inf, 1.0)])
def test_nothing_is_scaled_below_the_limit(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == factor


def test_clipping_is_torchs() -> None:
    assert clip_factor(2.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert math.isnan(clip_factor(math.nan, 1.0))
    assert clip_factor(math.inf, 1.0) == 0.0


@given(st.lists(st.integers(0, 3 * SQUARE_BLOCK), max_size=8), st.integers(1, 5))
def test_blocks_of_squares_are_whole_whatever_the_number_of_threads(sizes: list[int], threads: int) -> None:
    dealt = [part for worker in square_shares(sizes, threads) for part in worker]
    assert all(start % SQUARE_BLOCK == 0 for _, start, _ in dealt)
    assert all(stop % SQUARE_BLOCK == 0 or stop == sizes[tensor] for tensor, _, stop in dealt)
    assert sorted(dealt) == dealt, "blocks come in the order of their tensors"
    assert sum(stop - start for _, start, stop in dealt) == sum(sizes)


@given(st.integers(4096, 10**7), st.integers(1, 4), st.sampled_from([3, 4]), st.integers(0, 10**7))
def test_device_slots_and_scratch_fit_the_promise(bucket: int, slots: int, regions: int, elements: int) -> None:
    fit = device_slots(bucket, slots, regions, elements)
    assert fit.num_bytes <= slots * bucket
    assert fit.capacity % ALIGN == 0
    assert fit.num_slots * fit.capacity >= min(elements, fit.capacity)


@given(st.integers(64 * 1024, 10**9), st.integers(1, 4))
def test_full_device_slots_waste_less_than_a_thirtieth(bucket: int, slots: int) -> None:
    assert device_slots(bucket, slots, 3, 10**12).num_bytes >= slots * bucket * 29 // 30


def test_a_ring_is_no_larger_than_what_travels() -> None:
    assert ring_slot_bytes(1000, 128 * 2**20) == 1000
    assert ring_slot_bytes(10**12, 128 * 2**20) == 128 * 2**20


@given(st.sets(st.integers(0, 200), min_size=1, max_size=64), st.integers(1, 16))
def test_local_ranks_share_the_mask_without_overlap(cpus: set[int], parts: int) -> None:
    dealt = [cpu_share(sorted(cpus), index, parts) for index in range(parts)]
    assert all(dealt)
    if parts <= len(cpus):
        assert sorted(cpu for share in dealt for cpu in share) == sorted(cpus)


def test_streams_follow_numa_nodes_and_accelerators() -> None:
    assert [num_streams(nodes, 8) for nodes in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert num_streams(2, 0) == num_streams(2, 1) == 1


def test_a_stream_stays_on_its_own_numa_nodes() -> None:
    nodes = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert by_node(range(8), nodes, 2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert by_node((2, 3, 4), nodes, 2) == ((2, 3), (4,))
    assert by_node(range(8), nodes, 1) == (tuple(range(8)),)
    assert by_node((0, 1), nodes, 2) == ((0,), (1,)), "one node, two streams: its CPUs are dealt out"
