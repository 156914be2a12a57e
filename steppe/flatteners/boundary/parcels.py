"""Parcels and handles: one range of one storage on its way to the host and back.

A `Parcel` is moved bytes, a `Handle` is what autograd holds for one packed tensor: which parcel, which geometry, which
version. Several handles may share a parcel, so a storage that is met twice travels once.

Note [Who keeps a boundary on the device]
`Parcel.here` is the only strong reference to the device tensor that SCO holds. It is dropped once the copy to the host
is ordered before whatever the compute stream does next, set again when a reload is issued, and dropped when every
handle that asked for the reload (`claims`) has taken it. Nothing is found by address: a parcel holds a weak reference
to the storage it came from, which keeps the storage's identity from being given to another one.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from steppe.runtime import scopes
from steppe.runtime.arena import Arena, Block
from steppe.runtime.lanes import Lane, Ticket

OWNER = "boundary"
NOTICEABLE_S = 20e-6  # a shorter wait is the cost of asking


@dataclass
class Counts:
    """What happened so far; every number only grows."""

    boundaries: int = 0
    offloaded: int = 0
    kept: int = 0
    recomputed: int = 0
    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    reloads: int = 0
    waits: int = 0
    wait_s: float = 0.0
    replays: int = 0
    extras_kept: int = 0
    extras_short_lived: int = 0
    marks_ignored: int = 0
    topk_pinned: int = 0
    topk_replayed: int = 0
    most_outstanding: int = 0
    held_elsewhere: int = 0
    bytes_held_elsewhere: int = 0
    left_alone: Counter[str] = field(default_factory=Counter)
    seen_extras: set[str] = field(default_factory=set)


class Transit:
    """The two lanes, the arena and the counts that all parcels of one SCO share."""

    def __init__(self, to_host: Lane, to_device: Lane, arena: Arena, counts: Counts) -> None:
        self.to_host, self.to_device, self.arena, self.counts = to_host, to_device, arena, counts
        # Finalizers run at any moment, inside a lane's or the arena's lock too: they only leave blocks here.
        self._returns: deque[tuple[Block, tuple[Ticket, ...]]] = deque()
        self._reloading: deque[Ticket] = deque()
        self._stalls: deque[tuple[torch.Event, torch.Event]] = deque()

    def leave(self, block: Block, tickets: tuple[Ticket, ...]) -> None:
        self._returns.append((block, tickets))

    def sweep(self) -> None:
        """Give back blocks that nobody needs and no copy touches any more."""
        for _ in range(len(self._returns)):
            block, tickets = self._returns.popleft()
            if all(ticket.done() for ticket in tickets):
                block.give_back()
            else:
                self._returns.append((block, tickets))

    def note_reload(self, ticket: Ticket) -> None:
        while self._reloading and self._reloading[0].done():
            self._reloading.popleft()
        self._reloading.append(ticket)
        self.counts.most_outstanding = max(self.counts.most_outstanding, len(self._reloading))

    def wait(self, ticket: Ticket, device: torch.device) -> None:
        """Wait for a reload and count what it cost: the host's time on the CPU, else the compute stream's."""
        if device.type == "cpu":
            started = time.perf_counter()
            ticket.release()
            self._count_wait(time.perf_counter() - started)
            return
        before, after = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        before.record()
        ticket.release()
        after.record()
        self._stalls.append((before, after))

    def read_stalls(self) -> None:
        """Turn the stalls that the device has come past into counts."""
        while self._stalls and self._stalls[0][1].query():
            before, after = self._stalls.popleft()
            self._count_wait(before.elapsed_time(after) / 1e3)

    def _count_wait(self, seconds: float) -> None:
        self.counts.waits += seconds > NOTICEABLE_S
        self.counts.wait_s += seconds

    def drain(self) -> None:
        self.to_host.drain()
        self.to_device.drain()
        self.sweep()


class Parcel:
    """One range of one storage: on the device, on the host, or on the way."""

    __slots__ = ("__weakref__", "_block", "_carrier", "_claims", "_constant", "_dense", "_device", "_dtype",
                 "_inbound", "_outbound", "_storage", "_transit", "_version", "here", "newest", "stays")  # fmt: skip

    def __init__(self, transit: Transit, tensor: torch.Tensor) -> None:
        self._transit = transit
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version, self._dtype, self._device = tensor._version, tensor.dtype, tensor.device
        self._dense = is_dense(tensor)
        self._carrier = _carrier(tensor, self._dense)
        self.here: torch.Tensor | None = self._alias(tensor)
        self._block: Block | None = None
        self._outbound: Ticket | None = None
        self._inbound: Ticket | None = None
        self._claims: Counter[int] = Counter()
        self._constant = not tensor.requires_grad
        self.newest = -1  # number of the newest boundary that holds it
        self.stays = False  # on the device, because a boundary says so or because the caller keeps it there

    @property
    def num_bytes(self) -> int:
        size, _, _ = self._carrier
        return torch.Size(size).numel() * self._dtype.itemsize

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, found by its storage's identity, is inside this range and unchanged since."""
        if tensor._version != self._version or tensor.dtype != self._dtype:
            return False
        size, stride, start = self._carrier
        if not self._dense:
            return (tensor.size(), tensor.stride(), tensor.storage_offset()) == (size, stride, start)
        offset = tensor.storage_offset()
        return is_dense(tensor) and start <= offset and offset + tensor.numel() <= start + size[0]

    def meet_again(self, tensor: torch.Tensor) -> None:
        """The storage was packed once more: it is on the device, so what left may stay here for a while."""
        if self.here is None or self._inbound is None:
            self.here = self._alias(tensor)
        # A mask or a table that several blocks read: the caller holds it anyway.
        self.stays |= self._constant and not tensor.requires_grad

    def ship(self, boundary: int) -> None:
        """Start the copy to the host, unless it happened, or a newer boundary still holds the tensor here."""
        if self.stays or self.here is None or self._outbound is not None or self.newest != boundary:
            return
        transit = self._transit
        self._block = transit.arena.lend(self.num_bytes, OWNER)
        lane = transit.to_host
        self._outbound = lane.copy(self._host(), self.here, after=lane.mark(), stage="offload", buffer=self._name())
        transit.counts.bytes_offloaded += self.num_bytes

    def retire(self, boundary: int) -> None:
        """Drop the device tensor: the compute stream waits for its copy first, so its memory can be used at once."""
        if self._outbound is None or self.stays or self.newest != boundary or self._claims or self._inbound is not None:
            return
        self._outbound.release()
        self.here = None

    def fetch(self, boundary: int, handles: int) -> None:
        """Have the tensor on the device, or on its way there, for this boundary's handles."""
        self._claims[boundary] = handles
        if self.here is not None:
            return
        lane, size_stride = self._transit.to_device, self._carrier[:2]
        # Allocated on the compute stream; the lane starts when that stream has come this far, not when the host has.
        with scopes.label(OWNER), torch.inference_mode(False), torch.no_grad():
            self.here = torch.empty_strided(*size_stride, dtype=self._dtype, device=self._device)
        assert self._outbound is not None
        self._inbound = lane.copy(
            self.here, self._host(), after=(self._outbound, lane.mark()), stage="reload", buffer=self._name()
        )
        counts = self._transit.counts
        if not self._storage.expired():  # a second pin: leaving has freed nothing
            counts.held_elsewhere += 1
            counts.bytes_held_elsewhere += self.num_bytes
        counts.bytes_reloaded += self.num_bytes
        counts.reloads += 1
        self._transit.note_reload(self._inbound)

    def take(self, boundary: int, *, last: bool = True) -> torch.Tensor:
        """The device tensor, with the compute stream waiting for it; gone from here with the last claim."""
        if self.here is None:
            self.fetch(boundary, 1)
        if self._inbound is not None:
            self._wait(self._inbound)
            self._inbound = None
        tensor = self.here
        assert tensor is not None
        self._claims[boundary] -= last
        if self._claims[boundary] <= 0:
            self.release(boundary)
        return tensor

    def release(self, boundary: int) -> None:
        """This boundary needs the device tensor no more (or not yet)."""
        del self._claims[boundary]
        if not self._claims and self._outbound is not None and not self.stays:
            if self._inbound is not None:  # never taken: the block may not be lent again before the copy has ended
                self._outbound, self._inbound = self._inbound, None
            else:
                self._outbound.release()  # still on its way out when it was wanted again: the lane lets go of it, too
            self.here = None

    def cancel(self, boundary: int) -> None:
        """Forget a fetch that nobody took."""
        if boundary in self._claims:
            self.release(boundary)

    def view(self, tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        """The geometry of one handle on this parcel's device tensor."""
        if not self._dense:
            return tensor.detach()
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset - self._carrier[2])

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            plain = tensor.detach()
            return plain.as_strided(*self._carrier) if self._dense else plain

    def _host(self) -> torch.Tensor:
        assert self._block is not None
        return self._block.view(self._carrier[0], self._dtype)

    def _name(self) -> str:
        return f"{'x'.join(map(str, self._carrier[0]))} {self._dtype}".replace("torch.", "")

    def _wait(self, ticket: Ticket) -> None:
        if ticket.done():
            ticket.release()
        else:
            self._transit.wait(ticket, self._device)

    def __del__(self) -> None:
        block = getattr(self, "_block", None)
        if block is not None:
            self._transit.leave(block, tuple(t for t in (self._outbound, self._inbound) if t is not None))


def is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlap: the elements fill numel consecutive places, in whatever order."""
    return layout(tensor) == "dense"


def layout(tensor: torch.Tensor) -> str:
    """`dense`, `gaps`, or `overlap` (an expanded tensor, or windows that share elements)."""
    expected, kind = 1, "dense"
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size <= 1:
            continue
        if stride < expected:
            return "overlap"
        if stride > expected:
            kind = "gaps"
        expected = stride * size
    return kind


def _carrier(tensor: torch.Tensor, dense: bool) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """What travels: the dense range as one line of elements, or else the tensor as it is (its gaps stay behind)."""
    if dense:
        return (tensor.numel(),), (1,), tensor.storage_offset()
    return tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
