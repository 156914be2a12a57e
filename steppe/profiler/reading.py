"""What a measured ledger says: the table, and what the planner's decision tree (advice.py) makes of the timeline.

Pure functions over ledgers and timelines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Final

from steppe.core.ledger import OWNERS, PEAKS, Ledger
from steppe.core.units import format_bytes
from steppe.planner import advice as advice_of
from steppe.runtime.timeline import Timeline

_BAR: Final = 24


def without(timeline: Timeline, owners: Iterable[str]) -> int:
    """The device peak in bytes if these owners had held nothing: what no schedule of theirs can get below."""
    dropped = set(owners)
    rows = [i for i, owner in enumerate(timeline.owners) if owner not in dropped]
    return int(timeline.held[rows].sum(axis=0).max(initial=0))


def savings(timeline: Timeline) -> dict[str, int]:
    """By how many bytes the device peak would fall, at most, if one of the four peaks were gone."""
    return advice_of.savings(partial(without, timeline))


def order(timeline: Timeline) -> list[tuple[str, int]]:
    """(peak, device peak once it and those before it are gone): each time the one that lowers it most, if any does."""
    return advice_of.order(partial(without, timeline))


def advice(
    ledger: Ledger, timeline: Timeline, ceiling_bytes: int | None = None, on: Collection[str] = (),
    unseen: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """The planner's decision tree over a measured step, in sentences; `unseen` peaks have makers that nobody knew."""
    return advice_of.advise(ledger, partial(without, timeline), ceiling_bytes, on, unseen)


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
