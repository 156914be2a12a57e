"""`offload_extra="auto"`: time one block's recompute, rank what could be kept, take what pays on this link."""

from __future__ import annotations

from dataclasses import replace

from steppe.flatteners.boundary.pins import Timings, Wanted
from steppe.flatteners.boundary.schedule import Candidate, rank_candidates, reload_ns

PROFILED_RECOMPUTES = 2  # the first one warms up; of each call the lower time counts


def choose(timings: Timings, wanted: Wanted, to_device_rate: float, min_bytes: int) -> tuple[Wanted, list[Candidate]]:
    """What to keep from now on, and the candidates best first. Names are operator#call, as blocks repeat operators."""
    calls = {f"{name}#{nth}": (name, nth) for name, nth in timings.measured}
    candidates = [
        Candidate(label, size, taken, reload_ns(size, to_device_rate))
        for label, call in calls.items()
        for taken, size in (timings.measured[call],)
        if size and size >= min_bytes
    ]
    ranked = rank_candidates(candidates, wanted.limit)
    kept = frozenset(calls[c.operator] for c in ranked if c.choice == "keep")
    return replace(wanted, calls=kept), list(ranked)
