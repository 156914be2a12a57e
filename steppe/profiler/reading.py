"""What a measured ledger says: the table, what each schedule could save at most, and which to switch on first.

Pure functions over ledgers and timelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from steppe.core.ledger import OWNERS, PEAKS, Ledger
from steppe.core.units import format_bytes
from steppe.runtime.timeline import Timeline

SCHEDULES: Final = {
    "dispatch": "PipelinedLLEP",
    "vocab": "Ring-DTP",
    "boundary": "SCO",
    "optimizer": "OffloadStreamAdamW",
}
_STANDS_OUT: Final = 10  # a peak stands out when what stands then would fall by one part in so many
_BAR: Final = 24


def without(timeline: Timeline, owners: Iterable[str]) -> int:
    """The device peak in bytes if these owners had held nothing: what no schedule of theirs can get below."""
    dropped = set(owners)
    rows = [i for i, owner in enumerate(timeline.owners) if owner not in dropped]
    return int(timeline.held[rows].sum(axis=0).max(initial=0))


def savings(timeline: Timeline) -> dict[str, int]:
    """By how many bytes the device peak would fall, at most, if one of the four peaks were gone."""
    peak = timeline.peak[1]
    return {owner: peak - without(timeline, [owner]) for owner in PEAKS}


def order(timeline: Timeline) -> list[tuple[str, int]]:
    """(peak, device peak once it and those before it are gone): each time the one that lowers it most, if any does."""
    chosen: list[tuple[str, int]] = []
    height = timeline.peak[1]
    while len(chosen) < len(PEAKS):
        gone = [owner for owner, _ in chosen]
        left = {owner: without(timeline, [*gone, owner]) for owner in PEAKS if owner not in gone}
        best = min(left, key=lambda owner: left[owner])
        if left[best] >= height:
            break
        chosen.append((best, height := left[best]))
    return chosen


def advice(ledger: Ledger, timeline: Timeline, ceiling_bytes: int | None = None) -> tuple[str, ...]:
    """In sentences: who holds the peak, which schedules to switch on, in which order, and which would save nothing."""
    height = ledger.device_peak_bytes
    top = max(ledger.holders, key=lambda owner: ledger.holders[owner], default="other")
    share = 100 * ledger.holders.get(top, 0) // max(1, height)
    said = [f"The peak is {format_bytes(height)}, in {ledger.moment or 'no step'}; {top} holds {share}% of it."]
    if ceiling_bytes is not None:
        said.append(_against(height, ceiling_bytes))
    worth = [(owner, low) for owner, low, fall in _falls(timeline) if fall * _STANDS_OUT >= low + fall]
    for place, (owner, low) in enumerate(worth):
        first = "First" if place == 0 else "Then"
        said.append(f"{first} {owner} ({SCHEDULES[owner]}): the peak can fall to {format_bytes(low)}.")
    idle = [SCHEDULES[owner] for owner in PEAKS if owner not in dict(worth)]
    if idle and worth:
        said.append(f"{', '.join(idle)} would save next to nothing here.")
    least = without(timeline, PEAKS)
    if not worth:
        said.append("None of the four peaks stands out.")
    if ceiling_bytes is not None and (least if worth else height) > ceiling_bytes:
        said.append(
            f"It will not fit by schedules alone: what is left, {format_bytes(least)}, grows with batch x sequence "
            "length and with the weights of a rank; lower the first or use more ranks."
        )
    return tuple(said)


def _falls(timeline: Timeline) -> list[tuple[str, int, int]]:
    """(peak, height once it is gone too, bytes that this takes off) in the order in which to switch on."""
    falls, height = [], timeline.peak[1]
    for owner, low in order(timeline):
        falls.append((owner, low, height - low))
        height = low
    return falls


def _against(height: int, ceiling_bytes: int) -> str:
    room = ceiling_bytes - height
    if room >= 0:
        return f"It fits below {format_bytes(ceiling_bytes)}, with {format_bytes(room)} to spare."
    return f"It is {format_bytes(-room)} over the ceiling of {format_bytes(ceiling_bytes)}."


def table(ledgers: Mapping[str, Ledger]) -> str:
    """Owner by owner, the most that each held, one column a run; with one run, also who holds the peak."""
    runs = list(ledgers.values())
    rows = [_heads(ledgers), *_owner_rows(runs), *_total_rows(runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    bars = ["", *_bars(runs), *[""] * len(_total_rows(runs))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]
    owners = len(_shown(runs))
    return "\n".join([lines[0], rule, *lines[1 : 1 + owners], rule, *lines[1 + owners :]])


def _heads(ledgers: Mapping[str, Ledger]) -> list[str]:
    if len(ledgers) == 1:
        return ["", "most held", "at the peak", "share"]
    return ["", *ledgers]


def _shown(runs: list[Ledger]) -> list[str]:
    """The four peaks always, others where any run has them; an owner the house doesn't know comes last."""
    known = [*OWNERS, *sorted({owner for run in runs for owner in run.peaks} - set(OWNERS))]
    return [owner for owner in known if owner in PEAKS or any(run.peaks.get(owner) for run in runs)]


def _owner_rows(runs: list[Ledger]) -> list[list[str]]:
    if len(runs) > 1:
        return [[owner, *(format_bytes(run.peaks.get(owner, 0)) for run in runs)] for owner in _shown(runs)]
    run = runs[0]
    rows = []
    for owner in _shown(runs):
        now = run.holders.get(owner, 0)
        share = f"{100 * now / run.device_peak_bytes:.0f}%" if run.device_peak_bytes else "-"
        rows.append([owner, format_bytes(run.peaks.get(owner, 0)), format_bytes(now) if now else "-", share])
    return rows


def _bars(runs: list[Ledger]) -> list[str]:
    if len(runs) > 1:
        return [""] * len(_shown(runs))
    run = runs[0]
    height = max(1, run.device_peak_bytes)
    return ["#" * round(_BAR * run.holders.get(owner, 0) / height) for owner in _shown(runs)]


def _total_rows(runs: list[Ledger]) -> list[list[str]]:
    """The device's peak and where it stands, reserved memory where an allocator keeps some, the host's."""
    alone = len(runs) == 1
    blank = [""] * (1 if alone else 0)
    rows = [["device peak", *blank, *(format_bytes(run.device_peak_bytes) for run in runs)]]
    rows.append(["stands in", *blank, *(run.moment or "-" for run in runs)])
    if any(run.reserved_bytes is not None for run in runs):
        reserved = ("-" if run.reserved_bytes is None else format_bytes(run.reserved_bytes) for run in runs)
        rows.append(["reserved", *blank, *reserved])
    rows.append(["host arenas", *blank, *(format_bytes(run.host_bytes) for run in runs)])
    return [row + [""] * (1 if alone else 0) for row in rows]
