"""What goes where, in which order: buckets, slots, threads and the constants of a step. Integers and doubles only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

ALIGN: Final = 64  # elements: cuts fall on whole cache lines of every dtype
SQUARE_BLOCK: Final = 2**16  # elements of one partial sum of squares; the norm does not depend on buckets
STATE_BYTES: Final = 12  # float32 master, exp_avg and exp_avg_sq


class Step(NamedTuple):
    """Constants of one AdamW step of one parameter, in double; every implementation rounds them to float32 once."""

    scale: float
    shrink: float
    rate: float
    one_b1: float
    b2: float
    one_b2: float
    eps: float


def fold(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, t: int, *, scale: float = 1.0,
    maximize: bool = False,
) -> Step:  # fmt: skip
    """The constants of step `t` (from 1). With root = sqrt(1 - b2^t), both bias corrections are folded in:
    lr/(1-b1^t) * m / (sqrt(v)/root + eps) = (lr*root/(1-b1^t)) * m / (sqrt(v) + eps*root), one division an element.
    Decay is subtracted, w + (update - shrink*w): as a factor 1 - lr*weight_decay its rounding to float32 is off by as
    much in every step (after 200 steps at lr 1e-2 nine tenths of the error of torch.optim.AdamW).
    """
    b1, b2 = betas
    root = math.sqrt(1.0 - b2**t)
    return Step(
        scale=-scale if maximize else scale,
        shrink=lr * weight_decay,
        rate=-lr * root / (1.0 - b1**t),
        one_b1=1.0 - b1,
        b2=b2,
        one_b2=1.0 - b2,
        eps=eps * root,
    )


class Piece(NamedTuple):
    """Elements [start, stop) of tensor number `tensor`, at element `offset` of its bucket."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together. Offsets are aligned, so `length` may exceed the sum of the pieces."""

    pieces: tuple[Piece, ...]
    length: int


def cut(lengths: Sequence[int], capacity: int) -> tuple[Bucket, ...]:
    """Cut tensors into buckets of at most `capacity` elements, in order. Tensors may be split, at aligned elements.

    Every element lies in exactly one piece; every bucket but the last has less than ALIGN elements of room left.
    """
    capacity = max(ALIGN, capacity - capacity % ALIGN)
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for tensor, length in enumerate(lengths):
        start = 0
        while start < length:
            if filled == capacity:
                buckets.append(Bucket(tuple(pieces), filled))
                pieces, filled = [], 0
            stop = min(length, start + capacity - filled)
            pieces.append(Piece(tensor, start, stop, filled))
            filled += aligned(stop - start)
            start = stop
    if pieces:
        buckets.append(Bucket(tuple(pieces), filled))
    return tuple(buckets)


def aligned(length: int) -> int:
    """`length` rounded up to whole cache lines."""
    return -(-length // ALIGN) * ALIGN


def shares(bucket: Bucket, threads: int) -> tuple[tuple[Piece, ...], ...]:
    """Give each thread a contiguous aligned range of the bucket; a piece that two threads meet is cut at the border."""
    step = aligned(-(-bucket.length // threads))
    bounds = [(i * step, min((i + 1) * step, bucket.length)) for i in range(threads)]
    return tuple(tuple(_within(bucket.pieces, low, high)) for low, high in bounds if low < high)


def _within(pieces: Sequence[Piece], low: int, high: int) -> Iterator[Piece]:
    for piece in pieces:
        first, last = max(piece.offset, low), min(piece.offset + piece.length, high)
        if first < last:
            yield Piece(piece.tensor, piece.start + first - piece.offset, piece.start + last - piece.offset, first)


class Order(NamedTuple):
    """One thing to enqueue: stage `to_host`, `update` or `to_device` of a bucket, in ring slot `slot`."""

    stage: str
    bucket: int
    slot: int


def order(num_buckets: int, slots: int) -> Iterator[Order]:
    """The order in which the stages of all buckets are enqueued.

    A download into a slot comes only after the update that emptied it, an upload only after its update. Uploads trail
    by slots - 1 buckets, so that whoever enqueues may block on an update without starving the lane of downloads.
    """
    trail = slots - 1
    for i in range(num_buckets + trail):
        if i < num_buckets:
            yield Order("to_host", i, i % slots)
            yield Order("update", i, i % slots)
        if i >= trail:
            yield Order("to_device", i - trail, (i - trail) % slots)


def pipeline_seconds(stages: Sequence[Sequence[float]], slots: int) -> float:
    """Modelled time of three-stage buckets on one lane a stage: `stages[i]` are bucket i's (to_host, update, to_device)
    seconds. A download needs the slot of `slots` buckets ago to be updated; an update needs that slot's upload done.
    """
    done: list[tuple[float, float, float]] = []
    for i, (down, work, up) in enumerate(stages):
        last = done[i - 1] if i else (0.0, 0.0, 0.0)
        freed = done[i - slots] if i >= slots else (0.0, 0.0, 0.0)
        landed = max(last[0], freed[1]) + down
        updated = max(last[1], landed, freed[2]) + work
        done.append((landed, updated, max(last[2], updated) + up))
    return done[-1][2] if done else 0.0


def num_streams(numa_nodes: int, accelerators: int) -> int:
    """Update lanes side by side: one a NUMA node, but each needs two accelerators' links to be worth its threads."""
    return max(1, min(numa_nodes, accelerators // 2))


def cpu_share(cpus: Sequence[int], index: int, parts: int) -> tuple[int, ...]:
    """The part of an affinity mask that belongs to local rank `index` of `parts`; never empty."""
    ordered = sorted(cpus)
    if parts >= len(ordered):
        return (ordered[index % len(ordered)],)
    return tuple(ordered[index * len(ordered) // parts : (index + 1) * len(ordered) // parts])


def by_node(cpus: Sequence[int], nodes: Sequence[Sequence[int]], streams: int) -> tuple[tuple[int, ...], ...]:
    """Split CPUs into `streams` groups that do not straddle NUMA nodes where there are enough of them."""
    homes = [tuple(c for c in node if c in set(cpus)) for node in nodes]
    homes = [home for home in homes if home] or [tuple(cpus)]
    if streams == 1:
        return (tuple(cpus),)
    if len(homes) < streams:
        return tuple(cpu_share(cpus, i, streams) for i in range(streams))
    return tuple(tuple(c for home in homes[i::streams] for c in home) for i in range(streams))


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied with so that their norm stays within `max_norm`, as torch.nn.utils has it."""
    if max_norm is None:
        return 1.0
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1.0 else factor  # NaN stays NaN


def square_shares(lengths: Sequence[int], parts: int) -> list[list[tuple[int, int, int]]]:
    """Deal (tensor, start, stop) ranges, cut at whole blocks, to `parts` workers in nearly equal shares."""
    total = sum(lengths)
    limit = max(SQUARE_BLOCK, -(-total // parts))
    dealt: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    worker = filled = 0
    for tensor, length in enumerate(lengths):
        for start in range(0, length, SQUARE_BLOCK):
            stop = min(start + SQUARE_BLOCK, length)
            if filled >= limit and worker < parts - 1:
                worker, filled = worker + 1, 0
            last = dealt[worker][-1] if dealt[worker] else None
            if last is not None and last[0] == tensor and last[2] == start:
                dealt[worker][-1] = (tensor, last[1], stop)
            else:
                dealt[worker].append((tensor, start, stop))
            filled += stop - start
    return dealt


class DeviceSlots(NamedTuple):
    """Slots on the device: `num_slots` of `capacity` elements, `regions` float32 an element, and a scratch tile."""

    num_slots: int
    capacity: int
    regions: int
    tile: int

    @property
    def num_bytes(self) -> int:
        """The tile holds two float32 and one float64 an element."""
        return self.num_slots * self.capacity * 4 * self.regions + 16 * self.tile


def device_slots(bucket_bytes: int, slots: int, regions: int, num_elements: int) -> DeviceSlots:
    """The largest slots that fit, scratch included, into slots * bucket_bytes; no more than `num_elements` need."""
    capacity = max(ALIGN, aligned(min(num_elements, bucket_bytes // (4 * regions))))
    while True:
        count = max(1, min(slots, -(-num_elements // capacity)))
        fit = DeviceSlots(count, capacity, regions, max(ALIGN, capacity // 16))
        if capacity == ALIGN or fit.num_bytes <= slots * bucket_bytes:
            return fit
        capacity = max(ALIGN, capacity - max(ALIGN, aligned(capacity // 256)))


def ring_slot_bytes(wire_bytes: int, bucket_bytes: int) -> int:
    """Bytes of a host ring's slot: a bucket, or everything that travels where that is less."""
    return min(bucket_bytes, max(4 * ALIGN, wire_bytes))
