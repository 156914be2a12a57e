"""Integers: tiles stay under their budget, laws add up, auto takes the cheapest exact schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.errors import ConfigError
from steppe.flatteners.vocab.schedule import (
    ACCELERATOR_RATES,
    CPU_RATES,
    SCHEDULES,
    Head,
    Limits,
    Rates,
    allowed,
    choose,
    chunk_bounds,
    modelled_seconds,
    num_chunks,
    passes,
    tiles,
    wire,
)

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=6)
LIMITS = st.builds(
    Limits, budget_bytes=st.integers(1, 2**26), scratch_bytes=st.integers(1, 2**20),
    tile_tokens=st.none() | st.integers(1, 500), tile_vocab=st.none() | st.integers(1, 500),
    num_chunks=st.none() | st.integers(1, 9),
)  # fmt: skip


@st.composite
def heads(draw: st.DrawFn) -> Head:
    rows = draw(LENGTHS)
    shards = draw(st.lists(st.integers(0, 5000), min_size=len(rows), max_size=len(rows)).filter(any))
    item = draw(st.sampled_from([2, 4]))
    return Head(
        tuple(rows), tuple(shards), draw(st.integers(1, 4096)), item, item, hidden_grad=draw(st.booleans()),
        weight_grad=draw(st.booleans()), scalar=draw(st.booleans()), operand_bytes=draw(st.sampled_from([2, 4])),
    )  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True)
@given(head=heads(), limits=LIMITS, schedule=st.sampled_from(SCHEDULES))
def test_a_strip_stays_under_the_budget_or_is_as_small_as_it_can_be(head: Head, limits: Limits, schedule: str) -> None:
    sized = tiles(schedule, head, limits)
    assert min(sized.tile_tokens, sized.tile_vocab, sized.chunk, sized.scratch_bytes) >= 1
    at_once = schedule in ("local", "one_pass")
    columns = max(head.shards) if at_once else sized.tile_vocab
    needed = sized.tile_tokens * columns * 4 * (head.ranks if at_once else 1)
    assert needed <= sized.strip_bytes
    if limits.tile_tokens is None:
        smallest = columns * 4 * (head.ranks if at_once else 1)
        assert sized.strip_bytes <= max(limits.budget_bytes, smallest)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths=LENGTHS, chunk=st.integers(1, 700))
def test_chunks_cover_every_share_once_and_all_ranks_take_the_same_number(lengths: list[int], chunk: int) -> None:
    steps = num_chunks(tuple(lengths), chunk)
    for length in lengths:
        bounds = [chunk_bounds(length, chunk, step) for step in range(steps)]
        assert [row for start, stop in bounds for row in range(start, stop)] == list(range(length))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(head=heads(), limits=LIMITS)
def test_auto_takes_the_cheapest_schedule_that_is_exact(head: Head, limits: Limits) -> None:
    name, sized = choose("auto", head, limits, CPU_RATES)
    full = replace(head, hidden_grad=True, weight_grad=True)
    assert name in allowed(full)
    assert sized == tiles(name, head, limits)
    times = {other: modelled_seconds(other, full, tiles(other, head, limits), CPU_RATES) for other in allowed(full)}
    assert times[name] == min(times.values())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(head=heads(), schedule=st.sampled_from(SCHEDULES[1:]))
def test_all_that_is_sent_together_is_every_block_once_to_every_other_rank(head: Head, schedule: str) -> None:
    head = replace(head, hidden_grad=True, weight_grad=True)
    sent = [wire(schedule, head, rank) for rank in range(head.ranks)]
    hops, rows, shards = head.ranks - 1, sum(head.rows), sum(head.shards)
    travelling = shards if schedule == "weights" else rows
    item, home = head.weight_bytes * travelling, 4 * travelling
    forward, backward = hops * item * head.hidden, hops * (item + home) * head.hidden
    if schedule == "one_pass":
        forward, backward = hops * (item + home) * head.hidden, 0
    assert sum(w.forward for w in sent) == forward
    assert sum(w.backward for w in sent) == backward


def even(ranks: int, rows: int = 4096, vocab: int = 131_072, **changes: object) -> Head:
    head = Head((rows,) * ranks, (vocab // ranks,) * ranks, 4096, 2, 2)
    return replace(head, **changes)


def test_the_laws_of_equal_shares() -> None:
    head = even(4, rows=100, vocab=800)
    assert wire("weights", head, 0).forward == 3 * 200 * 4096 * 2
    assert wire("weights", head, 0).backward == 3 * 200 * 4096 * (2 + 4)
    assert wire("activations", head, 0).forward == 3 * 100 * 4096 * 2
    assert wire("activations", head, 0).backward == 3 * 100 * 4096 * (2 + 4)
    assert wire("one_pass", head, 0).forward == 3 * 100 * 4096 * (2 + 4)
    assert [passes(name, head) for name in SCHEDULES] == [3, 3, 4, 4]
    assert [passes(name, replace(head, hidden_grad=False)) for name in SCHEDULES] == [2, 2, 3, 3]
    assert [passes(name, replace(head, hidden_grad=False, weight_grad=False)) for name in SCHEDULES] == [1, 1, 1, 1]


def test_auto_weighs_what_travels_and_how_often_the_weight_is_read() -> None:
    limits = Limits(256 * 2**20, 2**20)
    assert choose("auto", even(1), limits, ACCELERATOR_RATES)[0] == "local"
    assert choose("auto", even(8), limits, ACCELERATOR_RATES)[0] == "one_pass"
    by_row = even(8, scalar=False)
    assert choose("auto", by_row, limits, ACCELERATOR_RATES)[0] == "activations"
    many_rows = even(8, scalar=False, rows=200_000)
    slow_network = Rates(ACCELERATOR_RATES.matmul, ACCELERATOR_RATES.memory, 1e8)
    assert choose("auto", many_rows, limits, slow_network)[0] == "weights"
    thin = Limits(2**20, 2**20)  # a budget that leaves two rows a block: the weight would be read too often
    assert choose("auto", even(1), thin, ACCELERATOR_RATES)[0] == "weights"


@pytest.mark.parametrize(
    ("wanted", "head"),
    [("local", even(2)), ("one_pass", even(2, scalar=False)), ("local", even(1, scalar=False)), ("ring", even(1))],
)
def test_a_schedule_that_can_not_be_exact_is_refused(wanted: str, head: Head) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        choose(wanted, head, Limits(2**20, 2**20), CPU_RATES)
