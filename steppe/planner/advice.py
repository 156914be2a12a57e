"""What to do about a step's memory, measured or predicted: who holds the peak, what to switch on, what saves nothing.

One decision tree for both. It asks one question only, `without(owners)`: the device peak in bytes if these owners had
held nothing. A measured step answers from its timeline, a predicted one from its moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from steppe.core.ledger import PEAKS, Ledger
from steppe.core.units import format_bytes

Without = Callable[[Iterable[str]], int]

SCHEDULES: Final = {
    "dispatch": "PipelinedLLEP",
    "vocab": "Ring-DTP",
    "boundary": "SCO",
    "optimizer": "OffloadStreamAdamW",
}
_STANDS_OUT: Final = 10  # a peak stands out when what stands then would fall by one part in so many


def predicted_without(ledger: Ledger) -> Without:
    """`without` of a ledger that was folded from entries."""

    def without(owners: Iterable[str]) -> int:
        dropped = set(owners)
        return Ledger.from_entries(e for e in ledger.entries if e.owner not in dropped).device_peak_bytes

    return without


def savings(without: Without) -> dict[str, int]:
    """By how many bytes the device peak would fall, at most, if one of the four peaks were gone."""
    peak = without(())
    return {owner: peak - without([owner]) for owner in PEAKS}


def order(without: Without) -> list[tuple[str, int]]:
    """(peak, device peak once it and those before it are gone): each time the one that lowers it most, if any does."""
    chosen: list[tuple[str, int]] = []
    height = without(())
    while len(chosen) < len(PEAKS):
        gone = [owner for owner, _ in chosen]
        left = {owner: without([*gone, owner]) for owner in PEAKS if owner not in gone}
        best = min(left, key=lambda owner: left[owner])
        if left[best] >= height:
            break
        chosen.append((best, height := left[best]))
    return chosen


def advise(
    ledger: Ledger, without: Without, ceiling_bytes: int | None = None, on: Collection[str] = (),
    unseen: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """In sentences: who holds the peak, which schedules to switch on, in which order, and which would save nothing.

    When all of them together don't make the step fit, what is left is batch x sequence length against the ceiling.
    Of peaks that are `unseen`, since nobody knew their makers, nothing is said.
    """
    height = ledger.device_peak_bytes
    top = max(ledger.holders, key=lambda owner: ledger.holders[owner], default="other")
    share = 100 * ledger.holders.get(top, 0) // max(1, height)
    said = [f"The peak is {format_bytes(height)}, in {ledger.moment or 'no step'}; {top} holds {share}% of it."]
    if ceiling_bytes is not None:
        said.append(_against(height, ceiling_bytes))
    worth = switch_on(without, on, ceiling_bytes, unseen)
    said += worth
    least = without(PEAKS)
    if not worth:
        said.append("None of the four peaks stands out.")
    if ceiling_bytes is not None and least > ceiling_bytes:
        said.append(
            f"It will not fit by schedules alone: what is left, {format_bytes(least)}, grows with batch x sequence "
            "length and with the weights of a rank; lower the first or use more ranks."
        )
    return tuple(said)


def switch_on(
    without: Without, on: Collection[str] = (), ceiling_bytes: int | None = None, unseen: Collection[str] = ()
) -> list[str]:
    """What to switch on, the most useful first, and what would save nothing; empty when no peak stands out.

    A small peak counts while the step is over a ceiling that the schedules reach. Those that are `on` already hold
    their policy's working set: that can be made smaller, not switched on.
    """
    falls, height, count = order(without), without(()), 0
    reached = ceiling_bytes is not None and without(PEAKS) <= ceiling_bytes
    for place, (_, low) in enumerate(falls):
        needed = reached and ceiling_bytes is not None and height > ceiling_bytes
        if needed or (height - low) * _STANDS_OUT >= height:
            count = place + 1  # and all before it: its `low` is reached with them gone
        height = low
    worth = falls[:count]
    new = [(owner, low) for owner, low in worth if owner not in on]
    said = [
        f"{'Then' if place else 'First'} {owner} ({SCHEDULES[owner]}): the peak can fall to {format_bytes(low)}."
        for place, (owner, low) in enumerate(new)
    ]
    said += [
        f"{SCHEDULES[owner]} is on: what {owner} still holds is its policy's working set; a smaller policy lowers it."
        for owner, _ in worth
        if owner in on
    ]
    idle = [SCHEDULES[owner] for owner in PEAKS if owner not in (*dict(worth), *on, *unseen)]
    if idle and worth:
        said.append(f"{', '.join(idle)} would save next to nothing here.")
    return said


def _against(height: int, ceiling_bytes: int) -> str:
    room = ceiling_bytes - height
    if room >= 0:
        return f"It fits below {format_bytes(ceiling_bytes)}, with {format_bytes(room)} to spare."
    return f"It is {format_bytes(-room)} over the ceiling of {format_bytes(ceiling_bytes)}."
