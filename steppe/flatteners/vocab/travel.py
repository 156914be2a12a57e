"""Blocks that go round the ranks, and results that go straight home, both while the ranks compute.

Every rank knows the length of every block, so messages have exact sizes and empty ones are left out on both ends. The
order of visits is the same for all: in step j a rank works on the block of rank (me - j), its own first; meanwhile that
block goes on to the right and the next one comes from the left. A result for another rank's block is sent straight to
that rank while the next block is worked on. No buffer is written before its exchange has been waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from steppe.flatteners.vocab.schedule import chunk_bounds, num_chunks
from steppe.flatteners.vocab.stats import RingStats
from steppe.runtime import collectives
from steppe.runtime.collectives import Group, Message, Pending

Tensor = torch.Tensor


class Wire:
    """Exchanges of one call, counted: the first `payload` tensors of a batch are payload, the others side messages."""

    def __init__(self, group: Group, stats: RingStats) -> None:
        self.group, self.stats = group, stats
        self.me, self.ranks = collectives.rank(group), collectives.size(group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], payload: int, what: str) -> Pending:
        """Start one batch of messages."""
        self.stats.payload_bytes += sum(_num_bytes(tensor) for tensor, _ in sends[:payload])
        self.stats.side_bytes += sum(_num_bytes(tensor) for tensor, _ in sends[payload:])
        return collectives.exchange(sends, receives, self.group, what)

    def wait(self, pending: Pending) -> None:
        started = time.perf_counter()
        pending.wait()
        self.stats.wait_s += time.perf_counter() - started

    def gather(self, tensor: Tensor) -> Tensor:
        """[P, ...]: a small tensor of every rank, counted as a message to each other rank."""
        self.stats.side_bytes += _num_bytes(tensor) * (self.ranks - 1)
        started = time.perf_counter()
        gathered = collectives.all_gather(tensor, self.group)
        self.stats.wait_s += time.perf_counter() - started
        return gathered


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Visit:
    """A block at this rank: rows `start` to `stop` of rank `owner`'s share, and where it stands in its round."""

    owner: int
    start: int
    stop: int
    step: int
    chunk: int
    tensors: tuple[Tensor, ...]


class Circle:
    """Shares of `lengths` rows go round in chunks; `own(start, stop)` gives this rank's rows.

    Peak: min(P - 1, 2) travelling blocks of one chunk.
    """

    def __init__(self, wire: Wire, lengths: tuple[int, ...], chunk: int, own: Callable[[int, int], tuple[Tensor, ...]]):
        self._wire, self._lengths, self._chunk, self._own = wire, lengths, chunk, own
        self._buffers: list[tuple[Tensor, ...]] = []

    def visits(self) -> Iterator[Visit]:
        for chunk in range(num_chunks(self._lengths, self._chunk)):
            yield from self._round(chunk)

    def _round(self, chunk: int) -> Iterator[Visit]:
        wire = self._wire
        bounds = [chunk_bounds(length, self._chunk, chunk) for length in self._lengths]
        block = self._own(*bounds[wire.me])
        for step in range(wire.ranks):
            owner, following = (wire.me - step) % wire.ranks, (wire.me - step - 1) % wire.ranks
            moving, arriving = None, ()
            if step < wire.ranks - 1:
                arriving = self._buffer(step, bounds[following][1] - bounds[following][0], block)
                right, left = (wire.me + 1) % wire.ranks, (wire.me - 1) % wire.ranks
                moving = wire.post([(t, right) for t in block], [(t, left) for t in arriving], 1, "travelling block")
            yield Visit(owner, *bounds[owner], step, chunk, block)
            if moving is not None:
                wire.wait(moving)
                block = arriving

    def _buffer(self, step: int, rows: int, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The buffer that this rank isn't working on."""
        turn = step % min(2, self._wire.ranks - 1)
        if turn == len(self._buffers):
            most = min(self._chunk, max(self._lengths))
            self._buffers.append(tuple(t.new_empty((most, *t.shape[1:])) for t in like))
        return tuple(t[:rows] for t in self._buffers[turn])


class Homing:
    """Results for visiting blocks: summed at home in a fixed order and landed when a chunk is complete.

    `tails` are the trailing shapes of a row's results (the first `payload` of them count as payload),
    `combine(home, arrived)` adds what arrived, and `land(start, stop, home)` takes a complete chunk.

    Peak: RING_BUFFERS (5) chunks of results for P > 1 (two at home, two leaving, one arriving), one for P = 1.
    """

    def __init__(
        self, wire: Wire, lengths: tuple[int, ...], chunk: int, tails: Sequence[tuple[int, ...]], like: Tensor,
        dtype: torch.dtype, payload: int, combine: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None],
        land: Callable[[int, int, tuple[Tensor, ...]], None],
    ) -> None:  # fmt: skip
        self._wire, self._lengths, self._chunk = wire, lengths, chunk
        self._payload, self._combine, self._land = payload, combine, land
        self._turn = 0
        self._underway: tuple[Pending, tuple[Tensor, ...], Visit] | None = None
        most = min(chunk, max(lengths))

        def buffer() -> tuple[Tensor, ...]:
            return tuple(like.new_empty((most, *tail), dtype=dtype) for tail in tails)

        alone = wire.ranks == 1
        self._home = [buffer() for _ in range(1 if alone else 2)]
        self._leaving = [] if alone else [buffer(), buffer()]
        self._arriving = () if alone else buffer()

    def room(self, visit: Visit) -> tuple[Tensor, ...]:
        """Where the results for this block go; zeroed."""
        if visit.owner == self._wire.me:
            buffers = self._home[visit.chunk % len(self._home)]
        else:
            self._turn = 1 - self._turn
            buffers = self._leaving[self._turn]
        return tuple(t[: visit.stop - visit.start].zero_() for t in buffers)

    def send(self, visit: Visit, results: tuple[Tensor, ...]) -> None:
        """The results are complete: off they go; what was underway is settled first."""
        if visit.owner == self._wire.me:
            if self._wire.ranks == 1:
                self._land(visit.start, visit.stop, results)
            return
        self.settle()
        start, stop = chunk_bounds(self._lengths[self._wire.me], self._chunk, visit.chunk)
        arriving = tuple(t[: stop - start] for t in self._arriving)
        source = (self._wire.me + visit.step) % self._wire.ranks
        pending = self._wire.post(
            [(t, visit.owner) for t in results], [(t, source) for t in arriving], self._payload, "results going home"
        )
        self._underway = pending, arriving, visit

    def settle(self) -> None:
        """Wait for what is underway and add it at home; call once more after the last visit."""
        if self._underway is None:
            return
        pending, arrived, visit = self._underway
        self._underway = None
        self._wire.wait(pending)
        start, stop = chunk_bounds(self._lengths[self._wire.me], self._chunk, visit.chunk)
        home = tuple(t[: stop - start] for t in self._home[visit.chunk % 2])
        self._combine(home, arrived)
        if visit.step == self._wire.ranks - 1:
            self._land(start, stop, home)
