"""One scheduler for the host link: boundary reloads go before optimizer traffic.

Several flatteners move bytes over the same link. Each keeps lanes of its own, FIFO in themselves; a `HostLink` decides
between lanes of one direction. Urgent lanes go first: somebody's backward waits for them. On the CPU one worker thread
a direction serves its lanes by urgency, a job at a time, and passes over a lane whose head still waits for a ticket, so
that an ordinary job waiting for an urgent one can't hold it up. On an accelerator ordinary copies wait, at the moment
they are enqueued, for the urgent ones enqueued before; a copy that has started is never taken back, so big ordinary
transfers should come in buckets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

import torch

from steppe.core.errors import LaneError
from steppe.runtime.lanes import After, Delay, Item, Lane, StreamLane, StreamTicket, ThreadLane

Direction = Literal["to_host", "to_device"]
_POLL_S: Final = 0.0005


class HostLink:
    """Lanes of both directions between one device and its host.

    `delay` and `rate` simulate a link on the CPU, as in `open_lane`; the rate is that of each direction, shared by its
    lanes.
    """

    def __init__(
        self, device: torch.device, *, delay: Delay | None = None, rate: float | None = None, timeout_s: float = 60.0
    ) -> None:
        if device.type != "cpu" and (delay is not None or rate is not None):
            raise LaneError("host link", "open", "", f"delay and rate are simulated on the CPU only, not on {device}")
        self.device, self.timeout_s = device, timeout_s
        self._delay, self._rate = delay, rate
        self._servers: dict[Direction, _Server] = {}
        self._urgent: dict[Direction, list[_OrderedStreamLane]] = {"to_host": [], "to_device": []}
        self._lanes: list[Lane] = []

    @property
    def simulated(self) -> bool:
        """Whether it stands for a link that the CPU hasn't: whoever keeps its bytes on a device then stages them."""
        return self.device.type == "cpu" and (self._delay is not None or self._rate is not None)

    def lane(self, name: str, direction: Direction, *, urgent: bool = False) -> Lane:
        """A lane of this link; urgent lanes of a direction are served before the others."""
        lane: Lane
        if self.device.type == "cpu":
            server = self._servers.setdefault(direction, _Server(direction))
            lane = _ServedLane(name, server, urgent, delay=self._delay, rate=self._rate, timeout_s=self.timeout_s)
        else:
            behind = [] if urgent else self._urgent[direction]
            lane = stream = _OrderedStreamLane(name, self.device, behind, timeout_s=self.timeout_s)
            if urgent:
                self._urgent[direction].append(stream)
        self._lanes.append(lane)
        return lane

    def close(self) -> None:
        """Finish what is enqueued and end the workers."""
        for lane in self._lanes:
            lane.close()
        for server in self._servers.values():
            server.close(self.timeout_s)
        self._lanes.clear()
        self._servers.clear()


class _Server:
    """One direction's worker: the next job is the head of the first lane, urgent ones first, that is ready."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.urgent: list[_ServedLane] = []
        self.ordinary: list[_ServedLane] = []
        self.wake = threading.Condition()
        self._ends = False
        self._worker = threading.Thread(target=self._serve, name=f"steppe-link-{name}", daemon=True)
        self._worker.start()

    def close(self, timeout_s: float) -> None:
        with self.wake:
            self._ends = True
            self.wake.notify()
        self._worker.join(timeout_s)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        while (lane := self._next()) is not None:
            lane.serve_head()

    def _next(self) -> _ServedLane | None:
        with self.wake:
            while True:
                waiting = [lane for lane in (*self.urgent, *self.ordinary) if lane.heads]
                for lane in waiting:
                    if lane.is_ready():
                        return lane
                if self._ends and not waiting:
                    return None
                # A head may become ready by a ticket of elsewhere, which wakes nobody here.
                self.wake.wait(_POLL_S if waiting else None)


class _ServedLane(ThreadLane):
    """A lane whose jobs a direction's shared worker runs."""

    def __init__(self, name: str, server: _Server, urgent: bool, *, delay: Any, rate: Any, timeout_s: float) -> None:
        self.heads: deque[Item] = deque()
        self._server = server
        super().__init__(name, delay=delay, rate=rate, timeout_s=timeout_s)
        with server.wake:
            (server.urgent if urgent else server.ordinary).append(self)

    def _start(self) -> None:
        """No thread of its own."""

    def _submit(self, item: Item) -> None:
        with self._server.wake:
            self.heads.append(item)
            self._server.wake.notify()

    def _stop(self) -> None:
        """What is enqueued ends first; the worker is the link's."""
        with suppress(LaneError):
            self.drain()

    def is_ready(self) -> bool:
        _, after, _ = self.heads[0][0]
        return all(ticket.done() for ticket in after)

    def serve_head(self) -> None:
        with self._server.wake:
            item = self.heads.popleft()
        self._perform(item)


class _OrderedStreamLane(StreamLane):
    """A stream whose copies wait for the urgent ones enqueued before them."""

    def __init__(self, name: str, device: torch.device, behind: list[_OrderedStreamLane], *, timeout_s: float) -> None:
        super().__init__(name, device, timeout_s=timeout_s)
        self._behind = behind

    def _enqueue(
        self, job: Callable[[], object], after: After, stage: str, buffer: str, keep: tuple[Any, ...]
    ) -> StreamTicket:
        for lane in self._behind:
            if lane._open:
                self._order_after(lane._open[-1])
        return super()._enqueue(job, after, stage, buffer, keep)
