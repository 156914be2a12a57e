"""Lanes: one FIFO of copies and jobs each, running beside compute.

On an accelerator a lane is one persistent stream and its tickets are events. On the CPU it is one worker thread that
really copies later, so that an ordering mistake is a wrong result on the CPU as well. Tests inject delays.

Note [lane rules]. A ticket of the compute stream is recorded on the stream that is current at the call (`mark`), never
inside the lane's stream context: there, the "current" stream is the lane itself and the wait would be a no-op. Sources
and destinations are referenced until their ticket is done, which replaces `record_stream`. References are given back
to the caller's thread to be dropped there, so that frees stay visible to whoever meters that thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from steppe.core.errors import LaneError, LaneTimeout

Delay = Callable[[], float]


class Ticket(Protocol):
    """The promise that everything enqueued before it has happened."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Make the current compute stream wait (on the CPU: the calling thread)."""

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Make the host wait."""

    def release(self) -> None:
        """Wait, and let go of source and destination now, though the device may not have come so far: for tensors
        allocated on the compute stream that is current here, whose memory is then reused behind the copy."""


After = Ticket | Iterable[Ticket] | None


def _tickets(after: After) -> tuple[Ticket, ...]:
    if after is None:
        return ()
    return tuple(after) if isinstance(after, Iterable) else (after,)


class Lane(Protocol):
    """One FIFO of copies and jobs; see `open_lane`."""

    name: str

    def copy(self, dst: torch.Tensor, src: torch.Tensor, *, after: After = None, stage: str = "copy",
             buffer: str = "") -> Ticket: ...  # fmt: skip

    def run(
        self, job: Callable[[], object], *, after: After = None, stage: str = "", buffer: str = "", num_bytes: int = 0
    ) -> Ticket:
        """Enqueue any callable; `num_bytes` is what it moves, for a throttled lane."""  # fmt: skip

    def mark(self) -> Ticket: ...

    def drain(self, timeout_s: float | None = None) -> None: ...

    def close(self) -> None: ...


def open_lane(
    name: str, device: torch.device, *, delay: Delay | None = None, rate: float | None = None, timeout_s: float = 60.0
) -> Lane:
    """Open a lane beside `device`'s compute.

    `delay` gives the seconds to sleep before each job (CPU lanes only; for tests). `rate` throttles copies to so many
    bytes per second, which simulates a link (CPU lanes only). `timeout_s` bounds every wait that names no time of its
    own. Raises `LaneError` for a delay or rate on an accelerator, where the hardware sets them.
    """
    if device.type == "cpu":
        return ThreadLane(name, delay=delay, rate=rate, timeout_s=timeout_s)
    if delay is not None or rate is not None:
        raise LaneError(name, "open", "", f"delay and rate are simulated on the CPU only, not on {device}")
    return StreamLane(name, device, timeout_s=timeout_s)


class ThreadTicket:
    """Completion of one job of a `ThreadLane`."""

    def __init__(self, lane: ThreadLane, stage: str, buffer: str, keep: tuple[Any, ...]) -> None:
        self._lane, self.stage, self.buffer = lane, stage, buffer
        self._keep: tuple[Any, ...] = keep
        self._finished = threading.Event()
        self.failure: BaseException | None = None

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        limit = self._lane.timeout_s if timeout_s is None else timeout_s
        if not self._finished.wait(limit):
            raise LaneTimeout(self._lane.name, self.stage, self.buffer, f"not finished after {limit:g} s")
        self._keep = ()
        self._lane.forget(self)
        if self.failure is not None:
            raise LaneError(self._lane.name, self.stage, self.buffer, repr(self.failure)) from self.failure

    synchronize = wait
    release = wait


class DoneTicket:
    """A ticket for what has already happened."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    synchronize = wait
    release = wait


# A job in a list of one: whoever performs it takes it out, so that no queue keeps a reference.
Item = list[tuple[Callable[[], object], tuple[Ticket, ...], "ThreadTicket"]]


class ThreadLane:
    """A lane on one worker thread of the CPU."""

    def __init__(self, name: str, *, delay: Delay | None, rate: float | None, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._delay, self._rate = delay, rate
        self._jobs: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._open: deque[ThreadTicket] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def copy(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: After = None, stage: str = "copy", buffer: str = ""
    ) -> ThreadTicket:
        # A new thread starts with grad mode on: detached aliases keep the copy out of every graph.
        target, source = dst.detach(), src.detach()

        def job() -> None:
            target.copy_(source)
            if self._rate is not None:
                time.sleep(source.numel() * source.element_size() / self._rate)

        return self._enqueue(job, after, stage, buffer, (dst, src, target, source))

    def run(
        self, job: Callable[[], object], *, after: After = None, stage: str = "", buffer: str = "", num_bytes: int = 0
    ) -> ThreadTicket:
        def throttled() -> None:
            job()
            if self._rate is not None:
                time.sleep(num_bytes / self._rate)

        return self._enqueue(throttled, after, stage, buffer, (job, throttled))

    def mark(self) -> DoneTicket:
        """On the CPU compute is synchronous: everything up to now has happened."""
        return DoneTicket()

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait for everything enqueued so far; raises the first failure."""
        while True:
            with self._lock:
                ticket = self._open[0] if self._open else None
            if ticket is None:
                return
            ticket.wait(timeout_s)

    def close(self) -> None:
        """End the worker after what is enqueued; failures nobody waited for are not raised here."""
        if not self._closed:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        self._worker = threading.Thread(target=self._work, name=f"steppe-{self.name}", daemon=True)
        self._worker.start()

    def _stop(self) -> None:
        self._jobs.put(None)
        self._worker.join(self.timeout_s)

    def _submit(self, item: Item) -> None:
        self._jobs.put(item)

    def forget(self, ticket: ThreadTicket) -> None:
        with self._lock:
            if ticket in self._open:
                self._open.remove(ticket)

    def _enqueue(
        self, job: Callable[[], object], after: After, stage: str, buffer: str, keep: tuple[Any, ...]
    ) -> ThreadTicket:
        if self._closed:
            raise LaneError(self.name, stage, buffer, "the lane is closed")
        self._reap()
        ticket = ThreadTicket(self, stage, buffer, keep)
        with self._lock:
            self._open.append(ticket)
        self._submit([(job, _tickets(after), ticket)])
        return ticket

    def _reap(self) -> None:
        """Drop finished jobs' references on the caller's thread and raise a failure nobody waited for."""
        while True:
            with self._lock:
                ticket = self._open[0] if self._open and self._open[0].done() else None
            if ticket is None:
                return
            ticket.wait()

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._jobs.get()) is not None:
            self._perform(item)

    def _perform(self, item: Item) -> None:
        """One job on the worker's thread; its failure is carried to the next wait."""
        job, after, ticket = item.pop()
        try:
            for earlier in after:
                earlier.synchronize(self.timeout_s)
            if self._delay is not None:
                time.sleep(self._delay())
            job()
        except BaseException as failure:
            ticket.failure = failure
        del job  # before the caller is woken, so that its own reference is the last one
        ticket._finished.set()


class StreamTicket:
    """An event on an accelerator's stream."""

    def __init__(self, lane: StreamLane, event: torch.Event, stage: str, buffer: str, keep: tuple[Any, ...]) -> None:
        self._lane, self._event, self.stage, self.buffer, self._keep = lane, event, stage, buffer, keep

    def done(self) -> bool:
        if self._event.query():
            self._keep = ()
            return True
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        torch.accelerator.current_stream(self._lane.device).wait_event(self._event)

    def release(self) -> None:
        self.wait()
        self._keep = ()

    def synchronize(self, timeout_s: float | None = None) -> None:
        limit = self._lane.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while not self._event.query():
            if time.monotonic() > deadline:
                raise LaneTimeout(self._lane.name, self.stage, self.buffer, f"not finished after {limit:g} s")
            time.sleep(20e-6)
        self._keep = ()


class StreamLane:
    """A lane on one persistent stream of an accelerator."""

    def __init__(self, name: str, device: torch.device, *, timeout_s: float) -> None:
        self.name, self.device, self.timeout_s = name, device, timeout_s
        self._stream = torch.Stream(device=device)
        self._open: deque[StreamTicket] = deque()

    def copy(
        self, dst: torch.Tensor, src: torch.Tensor, *, after: After = None, stage: str = "copy", buffer: str = ""
    ) -> StreamTicket:
        target, source = dst.detach(), src.detach()
        return self._enqueue(
            lambda: target.copy_(source, non_blocking=True), after, stage, buffer, (dst, src, target, source)
        )

    def run(
        self, job: Callable[[], object], *, after: After = None, stage: str = "", buffer: str = "", num_bytes: int = 0
    ) -> StreamTicket:
        return self._enqueue(job, after, stage, buffer, (job,))

    def mark(self) -> StreamTicket:
        event = torch.Event(device=self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return StreamTicket(self, event, "mark", "", ())

    def drain(self, timeout_s: float | None = None) -> None:
        while self._open:
            self._open[0].synchronize(timeout_s)
            self._open.popleft()

    def close(self) -> None:
        self.drain()

    def _enqueue(
        self, job: Callable[[], object], after: After, stage: str, buffer: str, keep: tuple[Any, ...]
    ) -> StreamTicket:
        for earlier in _tickets(after):
            self._order_after(earlier)
        event = torch.Event(device=self.device)
        try:
            with torch.no_grad(), self._stream:
                job()
                event.record(self._stream)
        except Exception as failure:
            raise LaneError(self.name, stage, buffer, repr(failure)) from failure
        ticket = StreamTicket(self, event, stage, buffer, keep)
        while self._open and self._open[0].done():
            self._open.popleft()
        self._open.append(ticket)
        return ticket

    def _order_after(self, earlier: Ticket) -> None:
        if isinstance(earlier, StreamTicket):
            self._stream.wait_event(earlier._event)
        else:
            earlier.synchronize(self.timeout_s)
