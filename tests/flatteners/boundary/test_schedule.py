"""The boundary planner against brute force, and its properties."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.flatteners.boundary import schedule
from steppe.flatteners.boundary.schedule import CHOICES, LONGEST_RUN, Boundaries, BoundaryPlan, Candidate, NoPlan

RATE = 10**9


@st.composite
def boundaries(draw: st.DrawFn, most: int = 6) -> Boundaries:
    count = draw(st.integers(1, most))
    sizes = draw(st.one_of(st.just([4] * count), st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    times = st.lists(st.integers(0, 12), min_size=count, max_size=count)
    return Boundaries(
        tuple(sizes), tuple(draw(times)), tuple(draw(times)), RATE, draw(st.sampled_from([RATE, 2 * RATE]))
    )


def assignments(count: int):
    for choices in itertools.product(CHOICES, repeat=count):
        runs = [len(list(run)) for choice, run in itertools.groupby(choices) if choice == "recompute"]
        if choices[0] != "recompute" and max(runs, default=0) <= LONGEST_RUN:
            yield choices


@settings(max_examples=150, deadline=None)
@given(boundaries(), st.integers(0, 40), st.integers(0, 40))
def test_plan_is_the_fastest_of_all_assignments_that_fit(given_boundaries, device_budget, host_budget):
    everything = [schedule.cost(given_boundaries, choices) for choices in assignments(len(given_boundaries.sizes))]
    fitting = [p for p in everything if p.device_bytes <= device_budget and p.host_bytes <= host_budget]
    found = schedule.plan(given_boundaries, device_budget, host_budget)
    if not fitting:
        least = min(p.device_bytes for p in everything if p.host_bytes <= host_budget)
        assert found == NoPlan(least, least - device_budget)
        return
    assert isinstance(found, BoundaryPlan)
    best = min(fitting, key=lambda p: (p.added_ns, p.device_bytes, p.host_bytes))
    assert (found.added_ns, found.device_bytes, found.host_bytes) == (
        best.added_ns, best.device_bytes, best.host_bytes)  # fmt: skip
    assert schedule.cost(given_boundaries, found.choices) == found


@settings(max_examples=50, deadline=None)
@given(boundaries(), st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_more_budget_never_makes_the_plan_slower(given_boundaries, device_budget, host_budget, more):
    tight = schedule.plan(given_boundaries, device_budget, host_budget)
    loose = schedule.plan(given_boundaries, device_budget + more, host_budget + more)
    if isinstance(tight, BoundaryPlan):
        assert isinstance(loose, BoundaryPlan)
        assert loose.added_ns <= tight.added_ns


def test_a_fast_link_offloads_all_but_the_last_when_the_device_holds_two():
    even = Boundaries((100,) * 48, (1000,) * 48, (3000,) * 48, RATE, RATE)
    found = schedule.plan(even, 200, 48 * 100)
    assert isinstance(found, BoundaryPlan)
    assert (found.added_ns, found.device_bytes, found.host_bytes) == (0, 200, 47 * 100)
    assert set(found.choices[:-1]) == {"offload"}


def test_no_host_memory_means_recomputing_within_the_longest_run():
    even = Boundaries((100,) * 12, (10,) * 12, (30,) * 12, RATE, RATE)
    found = schedule.plan(even, 500, 0)
    assert isinstance(found, BoundaryPlan)
    assert "offload" not in found.choices[:-1]
    assert found.host_bytes == 0
    assert found.device_bytes <= 500


def test_a_slow_link_keeps_what_the_device_has_room_for():
    slow = Boundaries((100,) * 8, (10,) * 8, (10,) * 8, RATE // 100, RATE // 100)
    found = schedule.plan(slow, 800, 800)
    assert isinstance(found, BoundaryPlan)
    assert found.choices == ("keep",) * 8


def test_candidates_are_ranked_by_time_saved_per_byte_and_cut_at_the_limit():
    measured = [Candidate("aten.slow", 100, 900, 100), Candidate("aten.fast", 100, 50, 100),
                Candidate("aten.good", 10, 500, 10), Candidate("aten.also", 100, 200, 100)]  # fmt: skip
    ranked = schedule.rank_candidates(measured, 2)
    assert [(c.operator, c.choice) for c in ranked] == [
        ("aten.good", "keep"), ("aten.slow", "keep"), ("aten.also", "recompute"), ("aten.fast", "recompute")
    ]  # fmt: skip
    assert "2 are kept" in ranked[2].why
    assert "reload" in ranked[3].why
