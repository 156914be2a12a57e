"""Who computes which routes: counts in, intervals of experts out. Pure integers, the same on every rank.

An expert's routes have one global order, (source rank, local position). A `Plan` cuts that order into intervals:
the owner keeps the head, helpers take tails. Piece p is the interval `[start[p], stop[p])` of `expert[p]`, computed by
rank `dest[p]`. Pieces are sorted by destination; there the natives come first, by id, then the foreign experts, by id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steppe.core.errors import ConfigError

Ints = NDArray[np.int64]
Move = tuple[int, int, int, int]  # expert, helper, start, stop


@dataclass(frozen=True)
class Plan:
    """Intervals of all experts over all ranks. Invariant: the pieces of an expert tile its routes exactly once."""

    num_experts: int
    num_ranks: int
    expert: Ints  # [P]
    dest: Ints  # [P]
    start: Ints  # [P]
    stop: Ints  # [P]
    cap: int  # no rank computes more rows than this

    @property
    def num_native(self) -> int:
        """Experts that live on each rank."""
        return self.num_experts // self.num_ranks

    @cached_property
    def owner(self) -> Ints:
        """The rank at which each piece's expert lives, [P]."""
        return self.expert // self.num_native

    @cached_property
    def first_piece(self) -> NDArray[np.intp]:
        """The first piece of each rank, [E_p]: every rank has its natives."""
        return np.searchsorted(self.dest, np.arange(self.num_ranks))

    @property
    def num_transfers(self) -> int:
        """Weights that travel in a forward pass."""
        return len(self.expert) - self.num_experts

    def loads(self) -> Ints:
        """Rows that each rank computes, [E_p]."""
        return _int_sums(self.dest, self.stop - self.start, self.num_ranks)


def plan_experts(
    counts: Ints,
    *,
    max_load: float = 1.1,
    switch_ratio: float = 1.3,
    min_rows: int = 0,
    ranks_per_node: int | None = None,
) -> Plan:
    """Least-loaded assignment of `counts` [E_p, E] under a hard cap; deterministic.

    Below `switch_ratio` (largest native load over the mean) every expert stays home. Otherwise each overloaded rank
    gives tails of its largest experts to the least-loaded rank, on its own node while one has room, until its load is
    at most `ceil(max_load * T / E_p)` (plus `min_rows`: no smaller interval is moved for the sake of the cap).

    Raises: ConfigError if E is not a multiple of E_p.
    """
    num_ranks, num_experts = counts.shape
    check_divides(num_experts, num_ranks)
    per_expert = counts.sum(axis=0, dtype=np.int64)
    native = per_expert.reshape(num_ranks, -1).sum(axis=1)
    total = int(native.sum())
    if int(native.max()) * num_ranks < switch_ratio * total or num_ranks == 1:
        return _assemble(per_expert, num_ranks, [], int(native.max()))
    cap = -int(-max_load * total // num_ranks)
    moves = _spill(per_expert, native, cap, min_rows, ranks_per_node or num_ranks)
    return _assemble(per_expert, num_ranks, moves, cap + min_rows)


def check_divides(num_experts: int, num_ranks: int) -> None:
    """Raises: ConfigError unless every rank owns the same number of experts."""
    if num_experts < 1 or num_experts % num_ranks:
        divisors = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        raise ConfigError(
            "experts over the ranks of the expert group", got=f"E {num_experts} over E_p {num_ranks}",
            allowed=f"E_p that divides E ({divisors})", remedy="choose another size of the expert group",
        )  # fmt: skip


def _spill(per_expert: Ints, native: Ints, cap: int, min_rows: int, ranks_per_node: int) -> list[Move]:
    """The moves: again and again the largest expert of the most loaded rank gives a tail to the least loaded helper, of
    its own node while one has room, else of any.

    A step exhausts the excess, the helper's room or the expert, so a (expert, helper) pair can't occur twice: for the
    same two to meet again, all three would have to be left over.
    """
    loads: list[int] = native.tolist()
    helpers = _heaps_by(ranks_per_node, ((rows, rank) for rank, rows in enumerate(loads) if rows < cap), len(loads))
    overloaded = [(-rows, rank) for rank, rows in enumerate(loads) if rows - cap > min_rows]
    heapify(overloaded)
    table = per_expert.reshape(len(loads), -1)
    num_native = table.shape[1]
    experts = {rank: [(-rows, e) for e, rows in enumerate(table[rank].tolist()) if rows] for _, rank in overloaded}
    for heap in experts.values():
        heapify(heap)
    moves: list[Move] = []
    while overloaded:  # in the planner's millisecond: calls are written out
        load, rank = overloaded[0]
        kept, local = experts[rank][0]
        near = helpers[rank // ranks_per_node] or min(filter(None, helpers))
        filled, helper = near[0]
        rows = cap - filled
        if rows < min_rows:
            rows = min_rows
        if rows > -load - cap:
            rows = -load - cap
        if rows < -kept:
            heapreplace(experts[rank], (kept + rows, local))
        else:
            rows = -kept
            heappop(experts[rank])
        if filled + rows < cap:
            heapreplace(near, (filled + rows, helper))
        else:
            heappop(near)
        if -load - rows - cap > min_rows:
            heapreplace(overloaded, (load + rows, rank))
        else:
            heappop(overloaded)
        moves.append((rank * num_native + local, helper, -kept - rows, -kept))
    return moves


def _heaps_by(width: int, items: Iterable[tuple[int, int]], num_ranks: int) -> list[list[tuple[int, int]]]:
    """A heap of (rows, rank) for each `width` neighbouring ranks."""
    heaps: list[list[tuple[int, int]]] = [[] for _ in range(-(-num_ranks // width))]
    for rows, rank in items:
        heaps[rank // width].append((rows, rank))
    for heap in heaps:
        heapify(heap)
    return heaps


def _assemble(per_expert: Ints, num_ranks: int, moves: list[Move], cap: int) -> Plan:
    num_experts = len(per_expert)
    natives = np.arange(num_experts, dtype=np.int64)
    if not moves:
        zeros = np.zeros(num_experts, np.int64)
        return Plan(num_experts, num_ranks, natives, natives // (num_experts // num_ranks), zeros, per_expert, cap)
    moved = np.fromiter(chain.from_iterable(moves), np.int64, 4 * len(moves)).reshape(-1, 4)
    keep = per_expert.copy()
    np.minimum.at(keep, moved[:, 0], moved[:, 2])
    expert = np.concatenate([natives, moved[:, 0]])
    dest = np.concatenate([natives // (num_experts // num_ranks), moved[:, 1]])
    start = np.concatenate([np.zeros(num_experts, np.int64), moved[:, 2]])
    stop = np.concatenate([keep, moved[:, 3]])
    foreign = np.arange(len(expert)) >= num_experts
    order = np.argsort((dest * 2 + foreign) * num_experts + expert)
    return Plan(num_experts, num_ranks, expert[order], dest[order], start[order], stop[order], cap)


def _int_sums(keys: Ints, values: Ints, length: int) -> Ints:
    """Sums of `values` by key; float64 sums of integers below 2**53 are exact."""
    sums: NDArray[Any] = np.bincount(keys, weights=values, minlength=length)
    return sums.astype(np.int64)
