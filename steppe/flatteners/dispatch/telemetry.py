"""What one layer's dispatch did, and what that says about the policy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from steppe.flatteners.dispatch.plan import Ints
from steppe.flatteners.dispatch.schedule import Layout

_EVENTS_KEPT: Final = 256  # timing events that wait to be read


@dataclass
class LayerStats:
    """Figures of the last planned pass of one layer, sums over all passes, and checks that came out."""

    layer: str = ""
    forwards: int = 0  # with gradients
    backwards: int = 0
    recomputes: int = 0
    flipped: int = 0  # recomputes whose router chose other experts
    chunks: int = 0
    chunk_rows: int = 0
    rows: int = 0
    most_routes: int = 0
    load_before: float = 1.0  # max / mean over ranks
    load_after: float = 1.0
    transfers: int = 0
    foreign: int = 0  # foreign experts on this rank
    wire_bytes: int = 0  # sent by this rank so far, rows and numbers
    exchange_ms: float = 0.0
    compute_ms: float = 0.0


class Clock:
    """Time spent inside spans: the host's on the CPU, the current stream's by events on an accelerator."""

    def __init__(self) -> None:
        self.total_ms = 0.0
        self._open: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def span(self, device: torch.device) -> Iterator[None]:
        """Measure what is enqueued inside; no host sync."""
        if device.type == "cpu":
            started = time.perf_counter()
            yield
            self.total_ms += 1e3 * (time.perf_counter() - started)
            return
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        begin.record(torch.accelerator.current_stream(device))
        yield
        end.record(torch.accelerator.current_stream(device))
        self._open.append((begin, end))
        if len(self._open) > _EVENTS_KEPT:
            self._settle([pair for pair in self._open if pair[1].query()])

    def read_ms(self) -> float:
        """All spans so far; waits for the device."""
        for _, end in self._open:
            end.synchronize()
        self._settle(list(self._open))
        return self.total_ms

    def _settle(self, pairs: list[tuple[torch.Event, torch.Event]]) -> None:
        for pair in pairs:
            self.total_ms += pair[0].elapsed_time(pair[1])
            self._open.remove(pair)


@dataclass
class Telemetry:
    """Collects `LayerStats`, and global counts [E] of routes while `counting` (for the routers' bias)."""

    layer: str = "experts"
    counting: bool = True
    learning: bool = True  # the forward under way runs with gradients
    stats: LayerStats = field(default_factory=LayerStats)
    exchange: Clock = field(default_factory=Clock)  # compute waited for the wire
    passes: Clock = field(default_factory=Clock)  # all chunks of a forward or backward
    counts: Ints | None = None
    taps: int = 0
    _flips: torch.Tensor | None = None

    def begin(self, learning: bool) -> None:
        """A call begins; in a recompute nothing follows it."""
        self.learning = learning
        self.taps += learning

    def planned(self, counts: Ints, layout: Layout, rank: int) -> None:
        """A forward was planned from global counts [E_p, E]."""
        stats, plan = self.stats, layout.plan
        stats.forwards += self.learning
        stats.chunks, stats.chunk_rows, stats.rows = layout.chunks, layout.chunk_rows, int(counts[rank].sum())
        stats.most_routes = int(counts.sum(axis=1).max())
        mean = max(1.0, counts.sum() / plan.num_ranks)
        stats.load_before = float(counts.sum(axis=0).reshape(plan.num_ranks, -1).sum(axis=1).max() / mean)
        stats.load_after = float(plan.loads().max() / mean)
        stats.transfers = plan.num_transfers
        stats.foreign = int(((plan.dest == rank) & (plan.owner != rank)).sum())
        if self.counting and self.learning:
            total = counts.sum(axis=0)
            self.counts = total if self.counts is None else self.counts + total

    def replayed(self, flipped: torch.Tensor) -> None:
        """A backward ran; `flipped` (0-d bool, on the device) says whether the recompute's expert ids differ."""
        self.stats.backwards += 1
        flip = flipped.to(torch.int32)
        self._flips = flip if self._flips is None else self._flips + flip

    def take_counts(self) -> Ints | None:
        """Counts since the last call."""
        counts, self.counts = self.counts, None
        return counts

    def read(self) -> LayerStats:
        """The stats now; reads one number from the device."""
        stats = self.stats
        stats.layer, stats.recomputes = self.layer, max(0, self.taps - stats.forwards)
        stats.flipped = 0 if self._flips is None else int(self._flips)
        stats.exchange_ms = self.exchange.read_ms()
        stats.compute_ms = max(0.0, self.passes.read_ms() - stats.exchange_ms)
        return stats


def diagnose(stats: dict[str, Any]) -> tuple[str, ...]:
    """Failure signals, in words with numbers: a cap too small or too large, spilling that does not help, ties."""
    found: list[str] = []
    for layer in stats["layers"]:
        found += _cap_signals(layer, stats["num_ranks"])
        if layer.transfers and layer.load_after > 0.95 * layer.load_before:
            found.append(
                f"{layer.layer}: {layer.transfers} spilled experts brought max/mean load from {layer.load_before:.2f} "
                f"only to {layer.load_after:.2f}: lower max_load, or raise switch_ratio so that they stay home"
            )
        if layer.flipped:
            found.append(
                f"{layer.layer}: {layer.flipped} recomputes chose other experts than the forward: the router's "
                "gradient is wrong there. Ties of top-k are pinned under SCO's checkpoint only"
            )
        if layer.forwards > layer.backwards > 0:
            found.append(
                f"{layer.layer}: {layer.forwards} forwards for {layer.backwards} backwards: something behind the "
                "experts saves a tensor (a norm, dropout), so that a checkpoint runs them again; or results went unused"
            )
        elif layer.recomputes and not stats["ties_pinned"]:
            found.append(
                f"{layer.layer}: the router ran again in {layer.recomputes} recomputes of a checkpoint that is not "
                "SCO's: ties of top-k can't be pinned there (none was broken the other way so far)"
            )
    return tuple(found)


def _cap_signals(layer: LayerStats, num_ranks: int) -> list[str]:
    found = []
    if num_ranks > 1 and layer.exchange_ms > layer.compute_ms > 0:
        found.append(
            f"{layer.layer}: waiting for the exchange took {layer.exchange_ms:.0f} ms, the experts "
            f"{layer.compute_ms:.0f} ms: the cap of {layer.chunk_rows} rows is too small "
            "to hide it, or the link too slow; raise chunk_tokens"
        )
    if layer.forwards and layer.chunk_rows >= layer.most_routes > 0:
        found.append(
            f"{layer.layer}: the cap of {layer.chunk_rows} rows is no smaller than the {layer.most_routes} routes of a "
            "rank: everything is one chunk and nothing is flattened; lower chunk_tokens"
        )
    return found
