"""Keep, offload or recompute for equal blocks: as good as the full search, at any depth, within a plan's second."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.shapes import BatchShape, MachineShape, MeshShape, RunShape
from steppe.flatteners import half
from steppe.flatteners.boundary.equal import plan_equal
from steppe.flatteners.boundary.schedule import Boundaries, BoundaryPlan, plan
from steppe.planner.layouts import Job
from steppe.planner.models import load_model
from steppe.planner.search import candidate, search

ROOMY = MachineShape(device_memory_bytes=141 * 10**9, host_memory_bytes=2 * 10**12)
SHAPE = RunShape(load_model("qwen3-235b-a22b"), BatchShape(2**20), MeshShape(64, sequence=64))


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 7),
    forward=st.integers(1, 20),
    backward=st.integers(1, 40),
    rate=st.integers(1, 10),
    device=st.integers(0, 9),
    host=st.integers(0, 9),
)
def test_equal_blocks_are_planned_as_well_as_by_the_full_search(
    count: int, forward: int, backward: int, rate: int, device: int, host: int
) -> None:
    size = 100
    blocks = Boundaries((size,) * count, (forward,) * count, (backward,) * count, rate * 10**9, rate * 10**9)
    quick, full = plan_equal(blocks, device * size, host * size), plan(blocks, device * size, host * size)
    assert isinstance(quick, BoundaryPlan) == isinstance(full, BoundaryPlan)
    if isinstance(quick, BoundaryPlan) and isinstance(full, BoundaryPlan):
        assert quick.added_ns == full.added_ns
        assert quick.device_bytes <= device * size
        assert quick.host_bytes <= host * size


def test_94_blocks_are_planned_at_once_and_within_both_rooms() -> None:
    budget = half("boundary", "budget")
    one = budget.boundary_bytes(SHAPE)
    start = time.process_time()
    policy = budget.fitted(SHAPE, MachineShape(), 30 * one, 20 * one)
    assert time.process_time() - start < 0.2
    entries = budget.entries(SHAPE, policy)
    assert sum(e.num_bytes for e in entries if e.place == "host" and e.tensor == "block inputs") <= 20 * one
    assert {policy.choice(i) for i in range(94)} == {"keep", "offload", "recompute"}


def test_with_room_on_the_host_and_a_quick_link_all_but_the_last_leave() -> None:
    budget = half("boundary", "budget")
    one = budget.boundary_bytes(SHAPE)
    quick = replace(MachineShape(), to_host_rate=1e15, to_device_rate=1e15)
    policy = budget.fitted(SHAPE, quick, 4 * one, 1000 * one)
    assert [policy.choice(i) for i in range(94)].count("offload") >= 93


def test_without_any_room_there_is_no_policy() -> None:
    assert half("boundary", "budget").fitted(SHAPE, MachineShape(), 0, 0) is None


def test_a_plan_uses_the_devices_room_before_the_hosts() -> None:
    """Forced on with a device half empty, boundaries stay there: nothing needs to travel."""
    asked = Job(load_model("qwen3-30b-a3b"), BatchShape(131_072), 16, machine=ROOMY, forced=(("boundary", True),))
    chosen = search(asked)
    assert chosen.fits
    default = candidate(chosen.shape, {**chosen.policies, "boundary": half("boundary", "budget").BoundaryPolicy()})
    assert chosen.time.parts["link"] <= default.time.parts["link"]
    assert chosen.forecast.device_peak_bytes <= ROOMY.device_memory_bytes


def test_too_little_host_memory_for_all_boundaries_is_fitted_not_refused() -> None:
    asked = Job(load_model("qwen3-235b-a22b"), BatchShape(2**23), 64, machine=ROOMY)
    spacious = search(asked)
    host = spacious.forecast.host_bytes_per_node
    tight = search(replace(asked, machine=replace(ROOMY, host_memory_bytes=host - 1)))
    assert tight.fits
    assert tight.forecast.host_bytes_per_node < host


def test_recomputed_boundaries_cost_the_forwards_that_make_them_again() -> None:
    """0 stored, 1 and 2 made from it (1 + 2 forwards), 3 stored, 4 made from it: 4 forwards of a block."""
    shape = replace(SHAPE, model=replace(SHAPE.model, num_layers=6))
    budget = half("boundary", "budget")
    choices = {1: "recompute", 2: "recompute", 4: "recompute"}
    stored, recomputed = (
        candidate(shape, {"boundary": budget.BoundaryPolicy("keep", per_boundary=named)}) for named in ({}, choices)
    )
    more = recomputed.time.compute - stored.time.compute
    assert more == pytest.approx(4 * budget.block_seconds(shape, shape.machine))
    assert recomputed.time.seconds > stored.time.seconds
