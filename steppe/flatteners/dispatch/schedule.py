"""Which rows travel in which chunk: plan in, row ranges out. Pure integers, the same on every rank.

Note [runs and groups]
A *run* is what one destination computes with one set of weights: group 0 is its natives, group g the g-th set of
`spill_slots / 2` foreign experts (two sets, one in use, one filling). Each run has a range of chunks of its own,
`[first_chunk, first_chunk + num_chunks)`, and every source's rows for the run are cut into that many contiguous parts.
So a destination receives at most `rows / num_chunks + 1` rows of each source in a chunk, and an expert's rows lie in
few neighbouring chunks: its gradient is complete early, and foreign weights are needed late.

Note [row bound]
`chunk_rows` = c*k. Receives: a run has `ceil(rows / chunk_rows)` chunks or more, so at most chunk_rows + E_p rows
arrive. Sends: `chunks` grows until no source's rate (the sum over destinations of rows / num_chunks) is above
chunk_rows, so at most chunk_rows + E_p rows leave. Neither depends on what the router did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steppe.flatteners.dispatch.plan import Ints, Plan


@dataclass(frozen=True)
class Ranges:
    """Ranges of contiguous rows, chunk after chunk: `ranges[j]` lists chunk j's (start, length)."""

    start: Ints
    length: Ints
    edges: Ints  # [n + 1]

    def __getitem__(self, chunk: int) -> list[tuple[int, int]]:
        part = slice(self.edges[chunk], self.edges[chunk + 1])
        return list(zip(self.start[part].tolist(), self.length[part].tolist()))


@dataclass(frozen=True)
class Layout:
    """All ranks' chunks. P pieces (of the plan), Q runs, n chunks; see Note [runs and groups]."""

    plan: Plan
    counts: Ints  # [E_p, E]
    run: Ints  # [P] the run of each piece
    run_dest: Ints  # [Q]
    run_rows: Ints  # [E_p, Q]
    first_chunk: Ints  # [Q]
    num_chunks: Ints  # [Q]
    chunks: int  # n
    chunk_rows: int  # c*k

    @property
    def row_bound(self) -> int:
        """No rank sends or receives more rows in a chunk."""
        return self.chunk_rows + self.plan.num_ranks


def lay_out(counts: Ints, plan: Plan, *, chunk_rows: int, spill_slots: int = 2) -> Layout:
    """Cut the plan into chunks of at most `chunk_rows + E_p` rows sent and received by any rank."""
    run, run_dest = _runs_of_pieces(plan, spill_slots // 2)
    run_rows = _rows_of_runs(counts, plan, run, len(run_dest))
    arrivals = run_rows.sum(axis=0)
    needed = -(-arrivals // chunk_rows)
    per_dest = _sum_by(run_dest, needed, plan.num_ranks)
    chunks = max(1, int(per_dest.max()), -(-int(run_rows.sum(axis=1).max()) // chunk_rows))
    spare, rows = _Spare(needed, arrivals, run_dest), run_rows.T.astype(np.float64)
    while True:
        num_chunks = spare.hand_out(chunks)
        first = spare.first_chunks(num_chunks)
        excess = _highest_send_rate(rows, first, num_chunks, chunks) / chunk_rows
        if excess <= 1 + 1e-12:
            return Layout(plan, counts, run, run_dest, run_rows, first, num_chunks, chunks, chunk_rows)
        chunks = max(chunks + max(1, chunks // 8), math.ceil(chunks * excess - 1e-9))


def _rows_of_pieces(counts: Ints, plan: Plan, pieces: slice | Ints) -> Ints:
    """Rows of these pieces at each source [E_p, ...]: overlaps with the sources' parts of the global order."""
    experts = plan.expert[pieces]
    edges = np.zeros((plan.num_ranks + 1, len(experts)), np.int64)
    np.cumsum(counts[:, experts], axis=0, out=edges[1:])
    np.minimum(np.maximum(edges, plan.start[pieces], out=edges), plan.stop[pieces], out=edges)
    overlap: Ints = edges[1:] - edges[:-1]
    return overlap


def _rows_of_runs(counts: Ints, plan: Plan, run: Ints, num_runs: int) -> Ints:
    """Rows of each run at each source [E_p, Q]: the natives' counts less what moved away, and what moved in."""
    ranks = plan.num_ranks
    rows = np.zeros((num_runs, ranks), np.int64)  # filled by runs, which are contiguous this way
    natives = np.einsum("sdm->ds", counts.reshape(ranks, ranks, plan.num_native))  # the fastest sum of a short axis
    owner = plan.owner
    moved = np.flatnonzero(owner != plan.dest)
    if len(moved):
        overlap = _rows_of_pieces(counts, plan, moved).T
        away = np.zeros((ranks, len(moved)))
        away[owner[moved], np.arange(len(moved))] = 1
        natives -= (away @ overlap).astype(np.int64)  # float64 sums of integers below 2**53 are exact
        into = run[moved]
        heads = np.flatnonzero(np.concatenate(([True], into[1:] != into[:-1])))
        several = len(heads) < len(moved)  # with two spill slots every foreign expert is a run by itself
        rows[into[heads]] = np.add.reduceat(overlap, heads, axis=0) if several else overlap
    rows[run[plan.first_piece]] = natives
    return rows.T


def _runs_of_pieces(plan: Plan, half: int) -> tuple[Ints, Ints]:
    """Run of each piece, destination of each run."""
    foreign = plan.owner != plan.dest
    index = np.arange(len(foreign))
    place = index - plan.first_piece[plan.dest]
    opens = np.where(foreign, (place - plan.num_native) % half == 0, place == 0)
    return opens.cumsum() - 1, plan.dest[opens]


class _Spare:
    """Chunks of each run for a given number of chunks: what it needs, spare ones by rows, the rest to the run with most
    rows a chunk. What does not depend on that number is made once."""

    def __init__(self, needed: Ints, arrivals: Ints, run_dest: Ints) -> None:
        num_runs = np.bincount(run_dest)
        starts = num_runs.cumsum() - num_runs
        several = np.flatnonzero(num_runs > 1)
        place = np.arange(int(num_runs.max()))
        self.needed, self.heads = needed, starts[run_dest]
        self.alone = starts[num_runs == 1]
        self.index = np.minimum(starts[several, None] + place, len(run_dest) - 1)
        self.present = place < num_runs[several, None]
        self.taken = np.add.reduceat(needed, starts)[several]
        self.places = self.index[self.present]
        self.base = np.where(self.present, needed[self.index], 0)
        self.rows = np.where(self.present, arrivals[self.index], 0)
        self.total = np.maximum(self.rows.sum(axis=1), 1)[:, None]
        self.line = np.arange(len(several))

    def hand_out(self, chunks: int) -> Ints:
        num_chunks = self.needed.copy()
        num_chunks[self.alone] = chunks
        if not len(self.line):
            return num_chunks
        given = (chunks - self.taken)[:, None] * self.rows // self.total
        given += self.base
        left = chunks - given.sum(axis=1)
        given[self.line, (self.rows / np.maximum(given, 1)).argmax(axis=1)] += left
        num_chunks[self.places] = given[self.present]
        return num_chunks

    def first_chunks(self, num_chunks: Ints) -> Ints:
        """Chunks of the same destination before each run."""
        before = num_chunks.cumsum() - num_chunks
        first: Ints = before - before[self.heads]
        return first


def _highest_send_rate(rows: NDArray[np.float64], first: Ints, num_chunks: Ints, chunks: int) -> float:
    """The most rows that any source sends in any chunk, before rounding to whole rows; `rows` of runs are [Q, E_p]."""
    index = np.arange(chunks)[:, None]
    share = ((index >= first) & (index < first + num_chunks)) / np.maximum(num_chunks, 1)
    return float((share @ rows).max())


@dataclass(frozen=True)
class Sends:
    """One source's side. `runs[j]` are ranges of its own routes in (expert, choice, token) order, in packing order."""

    runs: Ranges
    splits: list[list[int]]  # [n][E_p] rows for each destination


@dataclass(frozen=True)
class Receives:
    """One destination's side. Arrivals lie in (source, expert) order, grouped rows in (expert, source) order."""

    splits: list[list[int]]  # [n][E_p] rows from each source
    group: list[int]  # [n] which set of weights computes the chunk, 0 for the natives
    experts: list[list[tuple[int, int, int]]]  # [n] (place in the group, first row, end row) of the grouped rows
    gather: Ranges  # ranges of arrivals that make up the grouped rows
    scatter: Ranges  # ranges of grouped rows that make up the arrivals' order
    foreign: list[list[int]]  # [groups] ids of the experts of each group; the natives' list is empty
    group_chunks: list[tuple[int, int]]  # [groups] first chunk and end chunk


def send_tables(layout: Layout, rank: int) -> Sends:
    """`rank`'s own row: which of its routes leave in which chunk, and for whom."""
    plan, own = layout.plan, layout.counts[rank]
    first = layout.counts[:rank].sum(axis=0)[plan.expert]  # where the own routes begin in the experts' global order
    start = np.maximum(plan.start, first)
    rows = np.maximum(np.minimum(plan.stop, first + own[plan.expert]) - start, 0)
    cut = _cut(rows[None], layout, layout.run, layout.run_rows[rank][None], slice(None))[:, 0]
    length = cut[1:] - cut[:-1]  # [n, P]
    order_start = (own.cumsum() - own)[plan.expert] + np.where(rows > 0, start - first, 0)
    at = np.flatnonzero(length > 0)  # of booleans: several times faster than of integers
    chunk, piece = np.divmod(at, length.shape[1])
    runs = _joined(order_start[piece] + cut.reshape(-1)[at], length.reshape(-1)[at], chunk, layout.chunks)
    return Sends(runs, np.add.reduceat(length, plan.first_piece, axis=1).tolist())


def receive_tables(layout: Layout, rank: int) -> Receives:
    """`rank`'s own column: what arrives in which chunk, and where it goes."""
    plan = layout.plan
    mine = slice(*np.searchsorted(plan.dest, [rank, rank + 1]))
    runs = np.flatnonzero(layout.run_dest == rank)
    cut = _cut(_rows_of_pieces(layout.counts, plan, mine), layout, layout.run[mine], layout.run_rows, runs)
    length = cut[1:] - cut[:-1]  # [n, E_p, P_own]
    splits = np.einsum("jsp->js", length)
    gather, scatter = _permutations(length, splits.sum(axis=1))
    first = np.searchsorted(layout.run[mine], runs)
    chunks = list(zip(layout.first_chunk[runs].tolist(), (layout.first_chunk + layout.num_chunks)[runs].tolist()))
    group = [g for g, (start, stop) in enumerate(chunks) for _ in range(stop - start)]
    ids = np.split(plan.expert[mine], first[1:])
    return Receives(
        splits=splits.tolist(),
        group=group,
        experts=_experts_of_chunks(np.einsum("jsp->jp", length), group, first),
        gather=gather,
        scatter=scatter,
        foreign=[[], *(part.tolist() for part in ids[1:])],
        group_chunks=chunks,
    )


def choice_sizes(counts_by_choice: Ints, layout: Layout, rank: int, sends: Sends) -> list[list[int]]:
    """Rows of each choice in each of `rank`'s chunks [n][k], from its own [E, k] counts."""
    edges = np.append(0, counts_by_choice.reshape(-1).cumsum())  # routes in (expert, choice, token) order
    num_choices, runs = counts_by_choice.shape[1], sends.runs
    chunk_of = np.repeat(np.arange(layout.chunks), np.diff(runs.edges))
    by_start = np.argsort(runs.start)  # the ranges tile the routes, so each stretch between two cuts lies in one
    cuts = np.union1d(edges, runs.start)
    where = by_start[np.searchsorted(runs.start[by_start], cuts[:-1], side="right") - 1]
    choice = (np.searchsorted(edges, cuts[:-1], side="right") - 1) % num_choices
    cell = chunk_of[where] * num_choices + choice
    sizes = np.bincount(cell, np.diff(cuts), layout.chunks * num_choices).astype(np.int64)
    return [[int(n) for n in row] for row in sizes.reshape(-1, num_choices)]


def _cut(rows: Ints, layout: Layout, run: Ints, run_rows: Ints, runs: slice | NDArray[np.intp]) -> Ints:
    """Rows of each piece that lie before each chunk [n + 1, S, P], from the rows of pieces [S, P] and runs [S, Q]."""
    inside = np.repeat(_edges(layout, run_rows, runs), np.bincount(run - int(run[0])), axis=2)
    inside -= _exclusive_within(rows, run)
    np.maximum(inside, 0, out=inside)
    return np.minimum(inside, rows, out=inside)


def _edges(layout: Layout, run_rows: Ints, runs: slice | NDArray[np.intp]) -> Ints:
    """Rows of each run that lie before each chunk [n + 1, S, Q]: chunk j takes the j-th part of its run.

    Divided in float64, which is faster: below 2**52 the floor of its quotient of integers is exact.
    """
    count = layout.num_chunks[runs]
    place = np.arange(layout.chunks + 1)[:, None] - layout.first_chunk[runs]
    place = np.minimum(np.maximum(place, 0), count)[:, None]
    edges: NDArray[np.float64] = np.multiply(place, run_rows[:, runs], dtype=np.float64)
    edges /= np.maximum(count, 1)
    return edges.astype(np.int64)  # towards zero, the floor here


def _experts_of_chunks(length: Ints, group: list[int], first: Ints) -> list[list[tuple[int, int, int]]]:
    """(place in its group, first row, end row) of every expert with rows in each chunk, from rows [n, P_own]."""
    stop = length.cumsum(axis=1)
    chunk, piece = np.divmod(np.flatnonzero(length > 0), length.shape[1])
    place = piece - first[np.asarray(group)[chunk]]
    table: list[list[tuple[int, int, int]]] = [[] for _ in group]
    ends = stop[chunk, piece]
    for j, p, a, b in zip(chunk.tolist(), place.tolist(), (ends - length[chunk, piece]).tolist(), ends.tolist()):
        table[j].append((p, a, b))
    return table


def _permutations(length: Ints, arrivals: Ints) -> tuple[Ranges, Ranges]:
    """Ranges that take arrivals, in (source, expert) order, to grouped rows, in (expert, source) order, and back.

    `length` is [n, E_p, P_own], `arrivals` [n]. Only entries that hold rows are looked at: few, where routing is
    skewed.
    """
    chunks, num_sources, num_pieces = length.shape
    at = np.flatnonzero(length > 0)  # of booleans: several times faster than of integers
    rows = length.reshape(-1)[at]
    row, piece = np.divmod(at, num_pieces)
    chunk = row // num_sources
    grouped_order = np.argsort((chunk * num_pieces + piece) * num_sources + row - chunk * num_sources)
    earlier = (arrivals.cumsum() - arrivals)[chunk]  # a chunk's entries stay together, so it serves both orders
    rows_by_expert = rows[grouped_order]
    arrival = rows.cumsum() - rows - earlier
    grouped = np.empty_like(arrival)
    grouped[grouped_order] = rows_by_expert.cumsum() - rows_by_expert - earlier
    gather = _joined(arrival[grouped_order], rows_by_expert, chunk, chunks)
    return gather, _joined(grouped, rows, chunk, chunks)


def _joined(begin: Ints, rows: Ints, chunk: Ints, chunks: int) -> Ranges:
    """Ranges from non-empty pieces in the order of their chunks."""
    opens = np.ones(len(chunk), bool)
    opens[1:] = (begin[1:] != begin[:-1] + rows[:-1]) | (chunk[1:] != chunk[:-1])
    heads = np.flatnonzero(opens)
    total = np.add.reduceat(rows, heads) if len(heads) else rows
    return Ranges(begin[heads], total, np.searchsorted(chunk[heads], np.arange(chunks + 1)))


def _exclusive_within(values: Ints, keys: Ints) -> Ints:
    """Exclusive sums along the last axis, restarted where the (sorted) key changes."""
    before = values.cumsum(axis=-1) - values
    heads = np.searchsorted(keys, keys)
    restarted: Ints = before - before[..., heads]
    return restarted


def _sum_by(keys: Ints, values: Ints, length: int) -> Ints:
    """Sums of `values` by sorted key; every key occurs."""
    sums: Ints = np.add.reduceat(values, np.searchsorted(keys, np.arange(length)))
    return sums
