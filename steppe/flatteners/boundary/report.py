"""What SCO says about itself: its statistics, what is wrong with them, and the refusal of a run that moved nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steppe.core.errors import Refusal
from steppe.core.policy import Conflict
from steppe.core.units import format_bytes
from steppe.flatteners.boundary.budget import BoundaryPolicy
from steppe.flatteners.boundary.parcels import Counts
from steppe.runtime.arena import Arena

MOST_WAITS = 0.5  # share of reloads that come late before the link counts as slower than the recompute
MOST_HELD = 0.25  # share of what went to the host that may have stayed on the device as well


class IdleOffloadError(Refusal):
    """Offload was asked for and no byte moved."""


@dataclass(frozen=True)
class BoundaryStats:
    """What SCO did so far. Bytes lent and reserved and the high water are the host arena's."""

    boundaries: int
    offloaded: int
    kept: int
    recomputed: int
    bytes_offloaded: int
    bytes_reloaded: int
    bytes_lent: int
    bytes_reserved: int
    high_water_bytes: int
    reloads: int
    waits: int
    wait_ms: float
    replays: int
    most_outstanding_reloads: int
    held_elsewhere: int
    bytes_held_elsewhere: int
    extras_kept: int
    extras_short_lived: int
    extras_missing: tuple[str, ...]
    marks_ignored: int
    topk_pinned: int
    topk_replayed: int
    left_alone: Mapping[str, int]
    compile: str
    compiled_graphs: int


def read(counts: Counts, arena: Arena, policy: BoundaryPolicy, compiled_graphs: int) -> BoundaryStats:
    """The statistics as of now. `extras_missing` are the names in the policy that no block ever met."""
    wanted = {".".join(name.split(".")[:2]) for name in (*policy.operators, *policy.labels)}
    return BoundaryStats(
        boundaries=counts.boundaries,
        offloaded=counts.offloaded,
        kept=counts.kept,
        recomputed=counts.recomputed,
        bytes_offloaded=counts.bytes_offloaded,
        bytes_reloaded=counts.bytes_reloaded,
        bytes_lent=arena.lent_bytes,
        bytes_reserved=arena.reserved_bytes,
        high_water_bytes=arena.high_water_bytes,
        reloads=counts.reloads,
        waits=counts.waits,
        wait_ms=counts.wait_s * 1e3,
        replays=counts.replays,
        most_outstanding_reloads=counts.most_outstanding,
        held_elsewhere=counts.held_elsewhere,
        bytes_held_elsewhere=counts.bytes_held_elsewhere,
        extras_kept=counts.extras_kept,
        extras_short_lived=counts.extras_short_lived,
        extras_missing=tuple(sorted(wanted - counts.seen_extras)) if counts.boundaries else (),
        marks_ignored=counts.marks_ignored,
        topk_pinned=counts.topk_pinned,
        topk_replayed=counts.topk_replayed,
        left_alone=dict(counts.left_alone),
        compile=policy.compile,
        compiled_graphs=compiled_graphs,
    )


def diagnose(stats: BoundaryStats) -> tuple[str, ...]:
    """Failure signals, in words; empty when all is well."""
    found = []
    if stats.offloaded >= 2 and not stats.bytes_offloaded:
        found.append(f"offload was asked for and nothing moved; left alone: {_reasons(stats.left_alone)}")
    if stats.reloads and stats.waits > MOST_WAITS * stats.reloads:
        found.append(
            f"reload is slower than recompute: {stats.waits} of {stats.reloads} reloads came late "
            f"({stats.wait_ms:.1f} ms waited); keep more boundaries on the device, or use a faster link"
        )
    found += [f"{conflict.what}; {conflict.remedy}" for conflict in double_pins(stats)]
    if stats.extras_short_lived:
        found.append(
            f"{stats.extras_short_lived} results beyond extra_limit counted as short-lived and are recomputed "
            f"({stats.extras_kept} were kept)"
        )
    if stats.extras_missing:
        found.append(f"offload_extra names what no block met: {', '.join(stats.extras_missing)}")
    if stats.marks_ignored:
        found.append(
            f"{stats.marks_ignored} long_lived marks were ignored: their label is not in offload_extra, or no "
            "single-output operator of the block made the tensor"
        )
    if stats.compile != "off" and stats.boundaries and not stats.compiled_graphs:
        found.append(f"compile={stats.compile!r} was asked for and nothing was compiled")
    return tuple(found)


def double_pins(stats: BoundaryStats) -> tuple[Conflict, ...]:
    """Tensors that went to the host while something else kept their storage on the device: they are held twice."""
    if stats.held_elsewhere < MOST_HELD * max(stats.reloads, 1):  # the caller may hold the first input, and no more
        return ()
    return (
        Conflict(
            f"{stats.held_elsewhere} of {stats.reloads} tensors stayed on the device after they had left for the host "
            f"({format_bytes(stats.bytes_held_elsewhere)} in all): something keeps them twice, as an attention "
            "function does that stores its output on its context",
            "save it with ctx.save_for_backward, which SCO sees, take it out of offload_extra, or let go of the list "
            "or hook that holds it",
        ),
    )


def refuse_idle(seen: str, left_alone: Mapping[str, int]) -> None:
    """Raises IdleOffloadError."""
    raise IdleOffloadError(
        "SCO was asked to offload boundaries", got=f"{seen}; left alone: {_reasons(left_alone)}",
        allowed="at least one boundary on its way to the host",
        remedy="see that the model is in training mode with its checkpointing switched on by SCO, lower min_bytes, "
        'or choose BoundaryPolicy("keep")',
    )  # fmt: skip


def _reasons(left_alone: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_alone.items()) or "nothing"
