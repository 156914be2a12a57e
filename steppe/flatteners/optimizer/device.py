"""The published form of the update: master and moments stream through the device, bucket by bucket.

Two lanes carry state in and out while compute updates the bucket between them. The arithmetic is the kernel's, one
torch operator an operation, so that nothing is contracted; the square root goes through float64, which rounds it right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from steppe.core.errors import LaneError
from steppe.flatteners.optimizer.pipeline import Lines, Task, copy_pairs, pair_bytes
from steppe.flatteners.optimizer.schedule import Bucket, DeviceSlots, Piece, Step, aligned, cut, device_slots
from steppe.runtime.lanes import Ticket

Pair = tuple[torch.Tensor, torch.Tensor]


class DevicePipeline:
    """Runs tasks bucket by bucket through `slots` slots of `bucket_bytes` on the device.

    Peak: slots * bucket_bytes on the device while a step runs, scratch of one tile included; nothing between steps.
    Exactness: bitwise equal to the host update, over bucket size, slots and delays.
    """

    def __init__(self, lines: Lines, device: torch.device, bucket_bytes: int, slots: int, *, poison: bool = False):
        self.lines, self.device, self.bucket_bytes, self.num_slots = lines, device, bucket_bytes, slots
        self.poison = poison

    def run(self, tasks: Sequence[Task]) -> None:
        """Update every task. Raises LaneError or LaneTimeout with lane, stage and bucket named."""
        lengths = [task.row.num_elements for task in tasks]
        regions = 4 if any(map(_on_host, tasks)) else 3
        slots = device_slots(self.bucket_bytes, self.num_slots, regions, sum(map(aligned, lengths)))
        flight = _Flight(self, tasks, cut(lengths, slots.capacity), _Memory(self, slots))
        try:
            flight.run()
        finally:
            for lane in self.lines.all():
                with suppress(LaneError):
                    lane.drain()


def _on_host(task: Task) -> bool:
    """Whether the gradient is the sum that an overlapped backward left on the host."""
    return task.gradient is task.row.gradient


class _Memory:
    """The slots, [slots, regions, capacity] float32, and a scratch tile."""

    def __init__(self, pipeline: DevicePipeline, slots: DeviceSlots) -> None:
        self.slots = torch.empty((slots.num_slots, slots.regions, slots.capacity), device=pipeline.device)
        self.narrow = torch.empty((2, slots.tile), device=pipeline.device)
        self.wide = torch.empty(slots.tile, dtype=torch.float64, device=pipeline.device)
        if pipeline.poison:
            self.slots.fill_(torch.nan)


class _Flight:
    """One run: bucket i lives in slot i % slots from the start of its fetch to the end of its store."""

    def __init__(
        self, pipeline: DevicePipeline, tasks: Sequence[Task], buckets: Sequence[Bucket], memory: _Memory
    ) -> None:
        assert pipeline.lines.to_host is not None
        assert pipeline.lines.to_device is not None
        self.down, self.up = pipeline.lines.to_host, pipeline.lines.to_device
        self.pipeline, self.tasks, self.buckets, self.memory = pipeline, tasks, buckets, memory
        self.stored: dict[int, Ticket] = {}
        # The slots' memory may still be read by what compute had enqueued before they were allocated.
        self.ready = self.up.mark()

    def run(self) -> None:
        ahead = len(self.memory.slots)
        fetched = [self.fetch(index) for index in range(min(ahead, len(self.buckets)))]
        for index in range(len(self.buckets)):
            fetched[index].wait()
            self.update(index)
            self.store(index)
            if index + ahead < len(self.buckets):
                fetched.append(self.fetch(index + ahead))
        for ticket in self.stored.values():
            ticket.synchronize()

    def fetch(self, index: int) -> Ticket:
        pairs = [(slot, host) for p in self.buckets[index].pieces for slot, host in self._pairs(index, p)]
        after = [self.ready, *filter(None, [self.stored.get(index - len(self.memory.slots))])]
        return self.up.run(
            partial(copy_pairs, pairs),
            after=after,
            stage="fetch",
            buffer=f"bucket {index}",
            num_bytes=pair_bytes(pairs),
        )

    def update(self, index: int) -> None:
        tile = self.memory.wide.numel()
        for piece in self.buckets[index].pieces:
            task, region = self.tasks[piece.tensor], self._region(index, piece)
            gradient = region[3] if _on_host(task) else task.gradient[piece.start : piece.stop]
            parameter = task.parameter[piece.start : piece.stop]
            for start in range(0, piece.length, tile):
                part = slice(start, min(start + tile, piece.length))
                self._tile(*(region[i][part] for i in range(3)), gradient[part], parameter[part], _rounded(task.step))

    def store(self, index: int) -> None:
        pairs = [(host, slot) for p in self.buckets[index].pieces for slot, host in self._pairs(index, p)[:3]]
        self.stored[index] = self.down.run(
            partial(self._store, pairs, index), after=self.down.mark(), stage="store", buffer=f"bucket {index}",
            num_bytes=pair_bytes(pairs),
        )  # fmt: skip

    def _store(self, pairs: Sequence[Pair], index: int) -> None:
        copy_pairs(pairs)
        if self.pipeline.poison:
            self.memory.slots[index % len(self.memory.slots)].fill_(torch.nan)

    def _region(self, index: int, piece: Piece) -> torch.Tensor:
        return self.memory.slots[index % len(self.memory.slots)][:, piece.offset : piece.offset + piece.length]

    def _pairs(self, index: int, piece: Piece) -> list[Pair]:
        row, region = self.tasks[piece.tensor].row, self._region(index, piece)
        hosts = [row.master, row.exp_avg, row.exp_avg_sq]
        if _on_host(self.tasks[piece.tensor]):
            assert row.gradient is not None
            hosts.append(row.gradient)
        return [(slot, host[piece.start : piece.stop]) for slot, host in zip(region, hosts)]

    def _tile(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        gradient: torch.Tensor,
        parameter: torch.Tensor,
        s: Step,
    ) -> None:
        length = p.numel()
        (x, t), wide = self.memory.narrow[:, :length], self.memory.wide[:length]
        x.copy_(gradient).mul_(s.scale)
        torch.sub(x, m, out=t)
        m.add_(t.mul_(s.one_b1))
        torch.mul(x, s.one_b2, out=t)
        v.mul_(s.b2).add_(t.mul_(x))
        x.copy_(wide.copy_(v).sqrt_()).add_(s.eps)
        torch.mul(m, s.rate, out=t)
        t.div_(x)
        p.add_(t.sub_(torch.mul(p, s.shrink, out=x)))
        parameter.copy_(p)


def _rounded(step: Step) -> Step:
    """The constants as the kernel has them: float32."""
    return Step(*(ctypes.c_float(value).value for value in step))
