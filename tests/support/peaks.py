"""Two-sided memory assertions: formula <= measured <= formula + slack, with the reason of the slack written down."""

from __future__ import annotations

from collections.abc import Callable

from steppe.core.units import format_bytes
from steppe.runtime.allocator import allocator_peak


def measured_peak(fn: Callable[[], object]) -> int:
    """Bytes that `fn` holds at its peak above what was alive before, by the allocator's own events."""
    peak = allocator_peak(fn)
    return peak.peak_bytes - peak.base_bytes


def assert_peak(measured: int, formula: int, slack: int, why: str) -> None:
    """Assert the bound from both sides; `why` says what the slack is for."""
    assert why, "a slack needs its reason"
    assert formula <= measured, f"measured {format_bytes(measured)} is below the formula's {format_bytes(formula)}"
    assert measured <= formula + slack, (
        f"measured {measured:,} exceeds formula {formula:,} + slack {slack:,} ({why}) by {measured - formula - slack:,}"
    )
