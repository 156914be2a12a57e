"""Timelines: folding, compaction, phases, JSON. Integers only."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steppe.runtime.timeline import Timeline, fold, phases

changes = st.lists(st.tuples(st.sampled_from(["vocab", "weights", "other"]), st.integers(-50, 50)), max_size=40)


def timeline_of(pairs) -> Timeline:
    owners, held = fold([owner for owner, _ in pairs], np.array([delta for _, delta in pairs], dtype=np.int64))
    return Timeline(owners, np.arange(len(pairs), dtype=np.float64), held)


@given(changes)
def test_a_fold_is_the_running_sum_of_each_owner(pairs):
    timeline = timeline_of(pairs)
    for i, owner in enumerate(timeline.owners):
        expected = [sum(d for o, d in pairs[: t + 1] if o == owner) for t in range(len(pairs))]
        assert timeline.held[i].tolist() == expected


@given(changes, st.integers(1, 12))
def test_compaction_loses_no_peak(pairs, points):
    timeline = timeline_of(pairs)
    small = timeline.compact(points)
    assert small.seconds.size <= max(points, 0) or small is timeline
    assert small.peak == timeline.peak


@given(changes)
def test_json_gives_the_timeline_back(pairs):
    timeline = timeline_of(pairs)
    back = Timeline.from_json(timeline.to_json())
    assert back.owners == timeline.owners
    assert np.array_equal(back.held, timeline.held)
    assert np.array_equal(back.seconds, timeline.seconds)


def test_short_stretches_are_no_phase_and_what_they_part_stays_one():
    codes = np.array([0] * 10 + [1] * 10 + [0] + [1] * 10 + [2] * 10, dtype=np.int8)
    assert phases(codes, np.arange(41, dtype=np.float64)) == [(0.0, 0), (10.0, 1), (31.0, 2)]
    assert phases(codes[:0], np.zeros(0)) == []
