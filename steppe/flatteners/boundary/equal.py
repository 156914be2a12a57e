"""The plan of `schedule.plan` for blocks that are all alike, without its search: what a launch planner asks for.

With equal blocks only counts matter. For a given number of recomputed boundaries the cost grows with the number of
offloaded ones, so as few are offloaded as the device's room allows; where offloading adds nothing, as many as the host
holds. Recomputed boundaries stand in runs behind the stored ones, as even as can be.
"""

from __future__ import annotations

from steppe.flatteners.boundary.schedule import (
    LONGEST_RUN,
    Boundaries,
    BoundaryPlan,
    Choice,
    NoPlan,
    cost,
)


def plan_equal(boundaries: Boundaries, device_budget: int, host_budget: int) -> BoundaryPlan | NoPlan:
    """The fastest assignment under both budgets, the least device bytes among equally fast ones; O(L^2)."""
    assert all(len(set(column)) <= 1 for column in (boundaries.sizes, boundaries.forward_ns, boundaries.backward_ns))
    count = len(boundaries.sizes)
    plans = [
        cost(boundaries, choices)
        for recomputed in range(count)
        for choices in _ways(boundaries, recomputed, device_budget, host_budget)
    ]
    fitting = [p for p in plans if p.device_bytes <= device_budget and p.host_bytes <= host_budget]
    if fitting:
        return min(fitting, key=lambda p: (p.added_ns, p.device_bytes, p.host_bytes))
    on_the_host = [p for p in plans if p.host_bytes <= host_budget]
    least = min((p.device_bytes for p in on_the_host), default=boundaries.sizes[0])
    return NoPlan(least, max(0, least - device_budget))


def _ways(boundaries: Boundaries, recomputed: int, device_budget: int, host_budget: int) -> list[tuple[Choice, ...]]:
    """None, the least and the most boundaries offloaded when `recomputed` of them are computed again."""
    size, stored = boundaries.sizes[0], len(boundaries.sizes) - recomputed
    fits_device = max(0, device_budget // size - 1) if size else stored
    ways = []
    for runs in _runs(stored, recomputed):
        leaving = stored - int(runs[-1] == 0)  # the last boundary goes nowhere
        most = min(leaving, host_budget // size) if size else leaving
        least = min(max(0, stored - fits_device), most)
        ways += [_arranged(runs, offloaded) for offloaded in sorted({0, least, most})]
    return ways


def _runs(stored: int, recomputed: int) -> list[list[int]]:
    """How many recomputed boundaries follow each stored one, as even as can be: behind all, and behind all but the
    last, which then needs no way to the host."""
    ways = []
    for behind in {stored, max(stored - 1, 1)}:
        share, more = divmod(recomputed, behind)
        runs = [share + 1] * more + [share] * (behind - more) + [0] * (stored - behind)
        if max(runs) <= LONGEST_RUN:
            ways.append(runs)
    return ways


def _arranged(runs: list[int], offloaded: int) -> tuple[Choice, ...]:
    """The first stored boundaries are offloaded, the later ones stay: they come back soonest."""
    choices: list[Choice] = []
    for index, run in enumerate(runs):
        choices.append("offload" if index < offloaded else "keep")
        choices.extend("recompute" for _ in range(run))
    return tuple(choices)
