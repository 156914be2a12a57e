"""Memory, threads and lanes of one optimizer: everything that does not know of groups, closures or state dicts."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from steppe.core.errors import ConfigError, LaneError, SteppeError
from steppe.flatteners.optimizer.budget import OptimizerPolicy
from steppe.flatteners.optimizer.crew import Crew, hire, numa_nodes
from steppe.flatteners.optimizer.device import DevicePipeline
from steppe.flatteners.optimizer.kernel import Kernel, load_kernel
from steppe.flatteners.optimizer.norms import Squares, squares
from steppe.flatteners.optimizer.overlap import Arrivals
from steppe.flatteners.optimizer.pipeline import HostPipeline, Lines, Task, link_lane, open_lines
from steppe.flatteners.optimizer.rows import Probes, Row, open_rows
from steppe.flatteners.optimizer.schedule import aligned, num_streams, ring_slot_bytes, square_shares
from steppe.runtime import sharded
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane
from steppe.runtime.link import HostLink


@dataclass(frozen=True)
class Wiring:
    """What an optimizer is handed from outside; None is made on demand.

    `open_lines` gives the lanes for a device (tests hand in delayed and throttled ones), `state` and `rings` are the
    arenas of the slabs and of the rings, `share` is this process's (local rank, local ranks) of the node's CPUs,
    `poison` fills device slots with NaN between buckets. `link` is the host link that is shared with others.
    """

    open_lines: Callable[[torch.device], Lines] | None = None
    state: Arena | None = None
    rings: Arena | None = None
    kernel: Kernel | None = None
    share: tuple[int, int] = (0, 1)
    poison: bool = False
    link: HostLink | None = None


@dataclass(eq=False)
class Engine:
    """Slabs, lanes, threads and pipelines, made for the device that the parameters are on."""

    policy: OptimizerPolicy
    wiring: Wiring
    device: torch.device
    rows: dict[torch.Tensor, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, wiring = self.policy, self.wiring
        self._process = os.getpid()
        self.streams = _streams(policy)
        self.kernel = wiring.kernel or load_kernel()
        self.crews = hire(policy.threads, self.streams, policy.numa, wiring.share)
        self.lines = (wiring.open_lines or partial(_lines, policy, self.streams, wiring.link))(self.device)
        self.state_arena = wiring.state or Arena("optimizer state", pin=None if policy.update == "device" else False)
        self.rings = wiring.rings or Arena("optimizer rings")
        self.pipeline = self._pipeline()
        self.arrivals = Arrivals(
            self.lines,
            self.crews[0],
            self.kernel,
            self.rings,
            slots=policy.slots,
            with_norm=policy.max_norm is not None,
        )
        self.probes = Probes()
        self.step_seconds = self.update_seconds = 0.0
        self._close = weakref.finalize(self, _close, self.lines, self.crews)
        self._close.atexit = False

    def _pipeline(self) -> HostPipeline | DevicePipeline:
        if self.policy.update == "host":
            return HostPipeline(self.lines, self.crews, self.kernel, self.rings, self.policy.slots)
        return DevicePipeline(
            self.lines, self.device, self.policy.bucket_bytes, self.policy.slots, poison=self.wiring.poison
        )

    def check_process(self) -> None:
        """Refuse to work in a forked child: threads are not forked, so that every wait for one would last forever."""
        if os.getpid() != self._process:
            raise SteppeError(
                f"the optimizer's threads are in process {self._process}, and this is its forked child "
                f"{os.getpid()}. Remedy: make the optimizer in the child (its state_dict loads there)"
            )

    def close(self) -> None:
        """Remove hooks, end threads and lanes."""
        self.arrivals.unwatch()
        self._close()

    def open(self, parameters: Sequence[torch.Tensor]) -> None:
        """Allocate and first touch the state of these parameters, and the rings with the first of them.

        Raises: HostMemoryError, with nothing changed.
        """
        first = not self.rows
        in_place = self.policy.update == "host" and not self.lines.staged
        opened = open_rows(parameters, self.state_arena, gradients=self.policy.overlap_backward, in_place=in_place)
        if first:
            self._reserve(parameters)
        self.rows.update(opened)

    def _reserve(self, parameters: Sequence[torch.Tensor]) -> None:
        owns = [sharded.local(p) for p in parameters]
        widest = max((own.element_size() for own in owns), default=4)
        slot = ring_slot_bytes(sum(aligned(own.numel()) for own in owns) * widest, self.policy.bucket_bytes)
        self.arrivals.slot_bytes = slot
        if isinstance(self.pipeline, HostPipeline):
            self.pipeline.reserve(slot)
        elif self.policy.overlap_backward and self.lines.staged:
            self.rings.reserve(slot, 2 * self.policy.slots)

    def squares_of(self, gradients: Sequence[tuple[Row, torch.Tensor]]) -> list[Squares]:
        """Each gradient's sums of squares: what overlap has summed already, the rest on its device or by the crew."""
        known = {id(row): row.squares for row, _ in gradients if row.squares is not None}
        on_host = [flat for row, flat in gradients if id(row) not in known and flat.device.type == "cpu"]
        summed = iter(self._host_squares(on_host))
        results: list[Squares] = []
        for row, flat in gradients:
            found = known.get(id(row))
            if found is None:
                found = next(summed) if flat.device.type == "cpu" else squares(flat, self.kernel)
            results.append(found)
        return results

    def _host_squares(self, flats: Sequence[torch.Tensor]) -> list[list[float]]:
        crew = self.crews[0]
        dealt = square_shares([flat.numel() for flat in flats], len(crew))
        parts: list[list[list[float]]] = [[[] for _ in flats] for _ in dealt]

        def share(worker: int) -> None:
            for tensor, start, stop in dealt[worker]:
                parts[worker][tensor] += self.kernel.squares(flats[tensor][start:stop])

        crew.each([partial(share, worker) for worker in range(len(dealt))])
        return [[value for part in parts for value in part[tensor]] for tensor in range(len(flats))]

    @property
    def refreshed(self) -> int:
        """How many elements of masters were taken from weights so far."""
        return sum(row.refreshed for row in self.rows.values())

    def reconcile(self) -> None:
        """Masters follow weights that were changed behind the optimizer's back."""
        self.probes.check()
        for row in self.rows.values():
            if not row.unchanged():
                row.reconcile()

    def run(self, tasks: Sequence[Task]) -> None:
        """Update these tasks and remember what was written."""
        started, busy = time.perf_counter(), self._busy_seconds()
        self.pipeline.run(tasks)
        written = [task.row for task in tasks]
        torch.autograd.graph.increment_version([row.own for row in written])
        torch.autograd.graph.increment_version([r.parameter for r in written if sharded.is_sharded(r.parameter)])
        for row in written:
            row.remember()
        self.probes.take(self.rows.values())
        self.step_seconds, self.update_seconds = time.perf_counter() - started, self._busy_seconds() - busy

    def _busy_seconds(self) -> float:
        return sum(crew.busy_seconds for crew in self.crews)

    def stats(self) -> dict[str, Any]:
        elements = sum(row.num_elements for row in self.rows.values())
        return {
            "kernel": self.kernel.name, "device": str(self.device), "update": self.policy.update,
            "streams": self.streams, "threads": sum(map(len, self.crews)),
            "cpus": tuple(cpu for crew in self.crews for cpu in crew.cpus),
            "num_elements": elements, "host_state_bytes": self.state_arena.reserved_bytes,
            "host_ring_bytes": self.rings.reserved_bytes, "refreshed_elements": self.refreshed,
            "step_seconds": self.step_seconds, "update_seconds": self.update_seconds,
        }  # fmt: skip


def _streams(policy: OptimizerPolicy) -> int:
    if policy.update == "device":
        return 1
    if policy.streams == "auto":
        accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        return num_streams(len(numa_nodes()), accelerators)
    return policy.streams


def _lines(policy: OptimizerPolicy, streams: int, link: HostLink | None, device: torch.device) -> Lines:
    if policy.update == "device" and device.type == "cpu":
        # Without a link of its own the CPU still streams through slots, so that the schedule is the same everywhere.
        store, fetch = link_lane(link, "store", "to_host", device), link_lane(link, "fetch", "to_device", device)
        return Lines(store, fetch, _updates(policy))
    return open_lines(device, streams, with_updates=policy.overlap_backward or streams > 1, link=link)


def _updates(policy: OptimizerPolicy) -> tuple[Any, ...]:
    return (open_lane("adamw 0", torch.device("cpu")),) if policy.overlap_backward else ()


def one_device(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The accelerator that the parameters are on, or the CPU."""
    devices = {sharded.local(p).device for p in parameters}
    accelerators = sorted(map(str, devices - {torch.device("cpu")}))
    if len(accelerators) > 1:
        raise ConfigError("devices of the parameters", got=accelerators, allowed="one accelerator, and the CPU",
                          remedy="give each device an optimizer of its own")  # fmt: skip
    return torch.device(accelerators[0]) if accelerators else torch.device("cpu")


def _close(lines: Lines, crews: Sequence[Crew]) -> None:
    for lane in lines.all():
        with suppress(LaneError, RuntimeError):  # what failed was raised to whoever waited; a worker can't join itself
            lane.close()
    for crew in crews:
        crew.close()
