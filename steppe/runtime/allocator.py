"""The peak by the allocator's own events: the truth that the Meter is judged by.

On the CPU these are torch.profiler's memory events, so scratch memory inside an operator counts. They lack frees that
happen on a thread the profiler doesn't follow (gloo's workers, a lane's worker): an allocation whose free was not
reported ends when its storage's death was heard, and at the latest when its address is given out again.
On an accelerator it is the caching allocator's own peak.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from steppe.runtime.storages import Held, Watch

_R = TypeVar("_R")


@dataclass(frozen=True)
class AllocatorPeak(Generic[_R]):
    """What `fn` returned, and the most bytes alive while it ran; `base_bytes` of them lived before (CPU: `alive`)."""

    result: _R
    peak_bytes: int
    base_bytes: int


def allocator_peak(
    fn: Callable[[], _R], *, device: torch.device | None = None, alive: Iterable[torch.Tensor] = ()
) -> AllocatorPeak[_R]:
    """Run `fn` and give its peak by the allocator's events.

    On the CPU bytes are counted from zero at the call plus those of `alive`: tensors that exist already and whose end,
    should `fn` end them, must count. Tensors of before that are not named there never count, nor do the blocks of host
    arenas (runtime/arena.py), which only on this device come from the same allocator.
    """
    device = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        return _caching_allocator_peak(fn, device)
    deaths = _Deaths()
    deaths.expect(alive)
    base_bytes = sum(span.num_bytes for span in deaths.spans)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded, deaths:
        result = fn()
    events = _allocations(recorded.profiler.kineto_results.experimental_event_tree())
    spans = _spans(events, deaths.by_address, deaths.host)
    deaths.close()
    return AllocatorPeak(result, _sweep([*deaths.spans, *spans]), base_bytes)


class _Span(NamedTuple):
    num_bytes: int
    start_ns: int
    end_ns: int | None


class _Deaths(Watch):
    """Times at which storages died, by the address of their memory."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.by_address: dict[int, list[int]] = defaultdict(list)
        self.host: dict[int, list[int]] = defaultdict(list)  # when memory at an address was said to be the host's
        self._expected: dict[int, Held] = {}
        self._ended: dict[int, int] = {}

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            for held in self.held(tensor):
                self._expected[id(held)] = held

    @property
    def spans(self) -> list[_Span]:
        """The life of the tensors that were there before."""
        return [_Span(held.num_bytes, 0, self._ended.get(key)) for key, held in self._expected.items()]

    def declared(self, storage: torch.UntypedStorage) -> None:
        self.host[storage.data_ptr()].append(time.time_ns())

    def born(self, held: Held, found: bool) -> None:
        storage = held()
        held.address = 0 if storage is None or storage.device.type == "meta" else storage.data_ptr()

    def resized(self, held: Held, old_bytes: int) -> None:
        self.born(held, found=False)

    def died(self, held: Held, time_ns: int) -> None:
        if id(held) in self._expected:
            self._ended[id(held)] = time_ns
        else:
            self.by_address[held.address].append(time_ns)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of every CPU allocation (positive) and free (negative) of the profiler's tree."""
    from torch._C._profiler import _EventType

    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def _spans(
    events: Iterable[tuple[int, int, int]], deaths: dict[int, list[int]], host: dict[int, list[int]]
) -> list[_Span]:
    """Each allocation's life; where no free was reported it ends by `deaths` or by the address's next use.

    What was declared the host's during its life is left out.
    """
    by_address: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for time_ns, address, num_bytes in events:
        by_address[address].append((time_ns, num_bytes))
    spans = []
    for address, changes in by_address.items():
        changes.sort()
        for place, (start_ns, num_bytes) in enumerate(changes):
            if num_bytes > 0:
                following = changes[place + 1] if place + 1 < len(changes) else None
                end_ns = _end_ns(start_ns, following, deaths.get(address, []))
                if not any(start_ns <= at and (end_ns is None or at < end_ns) for at in host.get(address, [])):
                    spans.append(_Span(num_bytes, start_ns, end_ns))
    return spans


def _end_ns(start_ns: int, following: tuple[int, int] | None, deaths: list[int]) -> int | None:
    if following is not None and following[1] < 0:
        return following[0]
    heard = bisect_left(deaths, start_ns)
    ends = deaths[heard : heard + 1] + ([following[0]] if following is not None else [])
    return min(ends, default=None)


def _sweep(spans: Iterable[_Span]) -> int:
    """The most bytes alive at one time; at equal times frees come first."""
    changes: list[tuple[int, int]] = []
    for span in spans:
        changes.append((span.start_ns, span.num_bytes))
        if span.end_ns is not None:
            changes.append((span.end_ns, -span.num_bytes))
    live = peak = 0
    for _, num_bytes in sorted(changes):
        live += num_bytes
        peak = max(peak, live)
    return peak


def _caching_allocator_peak(fn: Callable[[], _R], device: torch.device) -> AllocatorPeak[_R]:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    base_bytes = torch.accelerator.memory_allocated(device)
    result = fn()
    torch.accelerator.synchronize(device)
    return AllocatorPeak(result, torch.accelerator.max_memory_allocated(device), base_bytes)


def accelerator_memory_bytes(device: torch.device) -> int | None:
    """All memory of a CUDA device; None elsewhere, where torch doesn't tell."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
