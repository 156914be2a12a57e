"""The three stages of a host update, side by side: gradient to host, AdamW, parameter to device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from steppe.core.errors import LaneError
from steppe.flatteners.optimizer.crew import Crew
from steppe.flatteners.optimizer.kernel import Kernel
from steppe.flatteners.optimizer.rows import Row
from steppe.flatteners.optimizer.schedule import Bucket, Piece, Step, cut, order, shares
from steppe.runtime.arena import Arena, Block
from steppe.runtime.lanes import Lane, Ticket, open_lane
from steppe.runtime.link import Direction, HostLink


class Task(NamedTuple):
    """One parameter's update: its row, its flat gradient and parameter, and the constants of its step."""

    row: Row
    gradient: torch.Tensor
    parameter: torch.Tensor
    step: Step


@dataclass(frozen=True)
class Lines:
    """The lanes of one optimizer: two to and from the device, and one for each stream of updates.

    Without lanes to a device (parameters in host memory) the kernel reads gradients and writes parameters in place.
    """

    to_host: Lane | None = None
    to_device: Lane | None = None
    updates: tuple[Lane, ...] = ()

    @property
    def staged(self) -> bool:
        return self.to_host is not None

    def all(self) -> tuple[Lane, ...]:
        ends = (self.to_host, self.to_device)
        return (*(lane for lane in ends if lane is not None), *self.updates)

    def close(self) -> None:
        for lane in self.all():
            lane.close()


def open_lines(device: torch.device, streams: int, *, with_updates: bool, link: HostLink | None = None) -> Lines:
    """Lanes for parameters on `device`, ordinary ones of a shared `link`; on the CPU there is no link, unless that
    simulates one, so none to a device."""
    host = torch.device("cpu")
    on_host = device.type == "cpu" and not (link is not None and link.simulated)
    updates = (open_lane(f"adamw {i}", host) for i in range(streams)) if with_updates or not on_host else ()
    if on_host:
        return Lines(updates=tuple(updates))
    gradients, parameters = (
        link_lane(link, name, way, device) for name, way in (("gradients", "to_host"), ("parameters", "to_device"))
    )
    return Lines(gradients, parameters, tuple(updates))


def link_lane(link: HostLink | None, name: str, direction: Direction, device: torch.device) -> Lane:
    """A lane of the shared link, or one of its own."""
    return open_lane(name, device) if link is None else link.lane(name, direction)


class HostPipeline:
    """Runs tasks bucket by bucket, `slots` buckets in flight.

    Peak: host rings of 2 * slots * slot bytes (gradients, parameters); nothing on the device.
    Exactness: bitwise over bucket size, slots, streams, threads and delays: every element is updated once, by the same
    operations.
    """

    def __init__(self, lines: Lines, crews: Sequence[Crew], kernel: Kernel, arena: Arena, slots: int) -> None:
        self.lines, self.crews, self.kernel, self.arena = lines, crews, kernel, arena
        self.slots, self.slot_bytes = slots * len(crews), 0

    def reserve(self, slot_bytes: int) -> None:
        """Allocate the rings, at the moment that the optimizer allocates."""
        if self.lines.staged:
            self.arena.reserve(slot_bytes, 2 * self.slots)
        self.slot_bytes = slot_bytes

    def run(self, tasks: Sequence[Task]) -> None:
        """Update every task. Raises LaneError or LaneTimeout with lane, stage and bucket named."""
        flight = _Flight(self, tasks)
        try:
            for stage, bucket, _ in order(len(flight.buckets), self.slots):
                getattr(flight, stage)(bucket)
            flight.land()
        finally:
            flight.release_all()

    def travels(self, task: Task) -> bool:
        """Whether the gradient has to be brought to the host (the sums of overlapped backwards are there already)."""
        return self.lines.staged and task.gradient is not task.row.gradient

    def work(self, crew: Crew, tasks: Sequence[Task], bucket: Bucket, slots: _Slots) -> None:
        """AdamW over one bucket, shared out to a crew."""
        crew.each([partial(self._share, tasks, share, slots) for share in shares(bucket, len(crew))])

    def _share(self, tasks: Sequence[Task], pieces: Sequence[Piece], slots: _Slots) -> None:
        for piece in pieces:
            task, part = tasks[piece.tensor], slice(piece.start, piece.stop)
            row = task.row
            gradient = slots.gradient(task, piece) if self.travels(task) else task.gradient[part]
            parameter = slots.parameter(task, piece) if self.lines.staged else task.parameter[part]
            state = (row.master[part], row.exp_avg[part], row.exp_avg_sq[part])
            self.kernel.update(*state, gradient, parameter, task.step)


@dataclass
class _Slots:
    """The two ring slots of one bucket on its way, and the tickets until which they are in use."""

    wire: int  # bytes of the widest element that travels; pieces lie at their offset times this
    gradients: Block | None = None
    parameters: Block | None = None
    fetched: Ticket | None = None
    updated: Ticket | None = None

    def gradient(self, task: Task, piece: Piece) -> torch.Tensor:
        return self._view(self.gradients, piece, task.gradient.dtype)

    def parameter(self, task: Task, piece: Piece) -> torch.Tensor:
        return self._view(self.parameters, piece, task.parameter.dtype)

    def _view(self, block: Block | None, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        assert block is not None
        start = piece.offset * self.wire
        return block.view((block.num_bytes,), torch.uint8)[start : start + piece.length * dtype.itemsize].view(dtype)


class _Flight:
    """One run of the pipeline. Slots are lent when a bucket enters a stage and given back when the next stage is done.

    Whoever enqueues blocks while all slots are in use; `schedule.order` sees to it that no lane starves meanwhile.
    """

    def __init__(self, pipeline: HostPipeline, tasks: Sequence[Task]) -> None:
        self.pipeline, self.lines, self.arena, self.tasks = pipeline, pipeline.lines, pipeline.arena, tasks
        wire = max((task.parameter.element_size() for task in tasks), default=4)
        self.wire = max([wire, *(task.gradient.element_size() for task in tasks if pipeline.travels(task))])
        self.buckets = cut([task.row.num_elements for task in tasks], pipeline.slot_bytes // self.wire)
        self.slots = [_Slots(self.wire) for _ in self.buckets]
        self.uploads: dict[int, Ticket] = {}
        # Gradients are complete, and nobody reads the old weights any more, once compute has come to here.
        self.ready = self.lines.to_host.mark() if self.lines.to_host else None

    def to_host(self, index: int) -> None:
        self._free_gradients(index - self.pipeline.slots)
        pieces = [p for p in self.buckets[index].pieces if self.pipeline.travels(self.tasks[p.tensor])]
        if self.lines.to_host is None or not pieces:
            return
        slots = self.slots[index]
        slots.gradients = self.arena.lend(self.pipeline.slot_bytes, f"gradients of bucket {index}")
        pairs = [
            (slots.gradient(self.tasks[p.tensor], p), self.tasks[p.tensor].gradient[p.start : p.stop]) for p in pieces
        ]
        slots.fetched = self.lines.to_host.run(
            partial(copy_pairs, pairs),
            after=self.ready,
            stage="to_host",
            buffer=f"bucket {index}",
            num_bytes=pair_bytes(pairs),
        )

    def update(self, index: int) -> None:
        self._free_parameters(index - self.pipeline.slots)
        slots, stream = self.slots[index], index % len(self.pipeline.crews)
        if self.lines.staged:
            slots.parameters = self.arena.lend(self.pipeline.slot_bytes, f"parameters of bucket {index}")
        job = partial(self.pipeline.work, self.pipeline.crews[stream], self.tasks, self.buckets[index], slots)
        if self.lines.updates:
            slots.updated = self.lines.updates[stream].run(
                job, after=slots.fetched, stage="update", buffer=f"bucket {index}",
                num_bytes=_moved(self.buckets[index]),
            )  # fmt: skip
        else:
            job()

    def to_device(self, index: int) -> None:
        if self.lines.to_device is None:
            return
        slots = self.slots[index]
        pairs = [
            (self.tasks[p.tensor].parameter[p.start : p.stop], slots.parameter(self.tasks[p.tensor], p))
            for p in self.buckets[index].pieces
        ]
        after = [ticket for ticket in (self.ready, slots.updated) if ticket is not None]
        self.uploads[index] = self.lines.to_device.run(
            partial(copy_pairs, pairs),
            after=after,
            stage="to_device",
            buffer=f"bucket {index}",
            num_bytes=pair_bytes(pairs),
        )

    def land(self) -> None:
        """Wait until every parameter has arrived: the next forward may read them."""
        for index in range(len(self.buckets)):
            self._free_gradients(index)
            self._free_parameters(index)

    def release_all(self) -> None:
        """Give every slot back, also after a failure; lanes are drained first, so that nobody writes into them."""
        for lane in self.lines.all():
            with suppress(LaneError):
                lane.drain()
        for slots in self.slots:
            self._give_back(slots, "gradients")
            self._give_back(slots, "parameters")

    def _free_gradients(self, index: int) -> None:
        if index >= 0 and (ticket := self.slots[index].updated) is not None:
            ticket.synchronize()
        if index >= 0:
            self._give_back(self.slots[index], "gradients")

    def _free_parameters(self, index: int) -> None:
        if index >= 0 and (ticket := self.uploads.get(index)) is not None:
            ticket.synchronize()
            self._give_back(self.slots[index], "parameters")

    def _give_back(self, slots: _Slots, which: str) -> None:
        block: Block | None = getattr(slots, which)
        if block is not None:
            block.give_back()
            setattr(slots, which, None)


def copy_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def pair_bytes(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(source.numel() * source.element_size() for _, source in pairs)


def _moved(bucket: Bucket) -> int:
    return sum(piece.length for piece in bucket.pieces)
