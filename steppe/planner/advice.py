"""What to do about a measured step: how large each peak is, which hits the ceiling first, what flattening it gives."""

from __future__ import annotations

from collections.abc import Iterator

from steppe.core.ledger import PEAKS, Ledger
from steppe.core.units import format_bytes
from steppe.flatteners import DECISION_ORDER

STANDS_OUT = 0.2  # of the device's peak


def advise(ledger: Ledger, device_memory_bytes: int | None = None) -> Iterator[str]:
    """The decision tree over a measured (or predicted) ledger, a sentence each.

    Flattening a peak helps only while it stands at the moment of the device's peak: what another moment holds is
    bounded by the peak that is left.
    """
    peak = max(ledger.device_peak_bytes, 1)
    for name in PEAKS:
        most, there = ledger.peaks.get(name, 0), ledger.holders.get(name, 0)
        yield f"{name}: {format_bytes(most)} at most, {format_bytes(there)} ({there / peak:.0%}) at the device's peak"
    yield from _what_first(ledger, peak)
    if device_memory_bytes is not None and peak > device_memory_bytes:
        yield f"the device misses {format_bytes(peak - device_memory_bytes)}"


def _what_first(ledger: Ledger, peak: int) -> Iterator[str]:
    """The largest of the four at the peak comes first; those that hold nothing there save nothing now."""
    there = {name: ledger.holders.get(name, 0) for name in PEAKS}
    first = max(DECISION_ORDER, key=lambda name: there[name])
    if there[first] < STANDS_OUT * peak:
        largest = max(ledger.holders, key=lambda owner: ledger.holders[owner], default="weights")
        yield (
            f"none of the four stands out (below {STANDS_OUT:.0%} each; {largest} holds most): lower batch x seqlen, "
            "the tokens a rank holds, towards the working-set ceiling, or take more ranks"
        )
        return
    yield f"{first} first: it hits the ceiling at {ledger.moment or 'the peak'}"
    idle = [name for name in DECISION_ORDER if not there[name] and name != first]
    if idle:
        yield f"{' and '.join(idle)} would save nothing here until then"
