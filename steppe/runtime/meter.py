"""The Meter: who holds the memory of a step, measured, as a Ledger.

Note [An owner is for life]
A storage has one owner from birth to death: the label (scopes.py) under which it was born, or the name that it was
given later, counted from its birth on. A gradient is born inside the backward of attention and named "gradients"
when it is accumulated; it was a gradient all along, so no byte is ever charged to two owners, one after the other.
The Meter therefore only writes down what happened, and sums when it is asked.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

import numpy as np
import torch

from steppe.core.ledger import PEAKS, Ledger, Moment
from steppe.runtime import scopes, storages
from steppe.runtime.naming import Naming
from steppe.runtime.storages import Held, Watch, host_name
from steppe.runtime.timeline import Floats, Ints, Timeline, fold, phases

_MOMENTS: Final = (Moment.FORWARD, Moment.LOSS, Moment.BACKWARD, Moment.UPDATE)
_FORWARD, _LOSS, _BACKWARD, _UPDATE = range(4)
_SETTLED: Final = frozenset({"weights", "gradients", "gathered", "optimizer"})


def charge(tensor: torch.Tensor, owner: str) -> None:
    """Name the owner of a tensor's memory to every Meter that runs; weights, gradients and states keep theirs."""
    for meter in active():
        meter.charge(tensor, owner)


def active() -> Iterator[Meter]:
    """The Meters that are entered now, outermost first."""
    return (watch for watch in storages.watches() if isinstance(watch, Meter))


class Meter(Watch):
    """`with Meter(model, optimizer) as meter: step()`, then `meter.ledger()`.

    Real CPU tensors, tensors of the accelerator, and fake tensors. `device_type` is the device whose memory is measured
    (default: the accelerator, else the CPU); CPU memory beside an accelerator, and host arenas anywhere, count as the
    host's. What lived before counts from when it is registered or first seen.

    Peak: 24 bytes of host memory for each birth, death and resize.
    Exactness: bitwise; operators run unchanged. Slower: see docs/profiling.md.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device_type: str | None = None,
    ) -> None:
        super().__init__(device_type)
        self._wanted = (model, optimizer)
        self._namings: list[Naming] = []
        self._when, self._which, self._delta, self._moment = array("q"), array("q"), array("q"), array("b")
        self._owner: list[str] = []
        self._place: list[str] = []
        self._marks: list[tuple[int, int, str]] = []
        self._update_depth = 0
        self._thread = threading.get_ident()
        self._start_ns = time.time_ns()
        self._caching = _CachingAllocator(self.device_type)

    def __enter__(self) -> Self:
        self._start_ns = time.time_ns()
        self._thread = threading.get_ident()
        self._caching.start()
        super().__enter__()
        try:
            self.register(*self._wanted)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            for naming in self._namings:
                naming.remove()
        finally:
            self._namings.clear()
            super().__exit__(*exc)
            self._caching.stop()
            self.close()

    def register(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Name a model's weights, gradients and gathered parameters and an optimizer's states, until the Meter ends."""
        if model is not None or optimizer is not None:
            self._namings.append(Naming(self, model, optimizer))

    def mark(self, name: str) -> None:
        """Write down that `name` begins now; `ledger(since=name)` counts from its last mark on."""
        self.drain()
        self._marks.append((len(self._when), time.time_ns(), name))

    def own(self, tensors: Iterable[torch.Tensor], owner: str) -> None:
        """Name the owner of these tensors' memory, whoever had it (Note [An owner is for life])."""
        for tensor in tensors:
            for held in self.held(tensor):
                self._owner[held.index] = owner

    def charge(self, tensor: torch.Tensor, owner: str) -> None:
        """Name the owner, unless the memory is a weight, a gradient, gathered or an optimizer's state.

        On another thread only what was seen already: that thread's work may be another's, with a Meter of its own.
        """
        here = threading.get_ident() == self._thread
        for held in self.held(tensor) if here else self.seen(tensor):
            if self._owner[held.index] not in _SETTLED:
                self._owner[held.index] = owner

    def updating(self, depth: int) -> None:
        """An optimizer's step begins (+1) or ends (-1)."""
        self._update_depth += depth

    def born(self, held: Held, found: bool) -> None:
        storage = held()
        name = None if storage is None or held.place == "device" else host_name(storage)
        held.index = len(self._owner)
        self._owner.append(name or (scopes.UNLABELLED if found else scopes.current()))
        self._place.append(held.place)
        self._changed(held, held.num_bytes, time.time_ns() if found else self.operator_ns)

    def resized(self, held: Held, old_bytes: int) -> None:
        self._changed(held, held.num_bytes - old_bytes, time.time_ns())

    def died(self, held: Held, time_ns: int) -> None:
        self._changed(held, -held.num_bytes, time_ns)

    def declared(self, storage: torch.UntypedStorage) -> None:
        held = self._held.get(storage._cdata)
        if held is not None and held.index >= 0:
            self._place[held.index] = "host"
            self._owner[held.index] = host_name(storage) or self._owner[held.index]
        super().declared(storage)

    def _changed(self, held: Held, num_bytes: int, time_ns: int) -> None:
        self._when.append(time_ns)
        self._which.append(held.index)
        self._delta.append(num_bytes)
        self._moment.append(self._now())

    def _now(self) -> int:
        if self._update_depth:
            return _UPDATE
        if scopes.current() == "vocab":
            return _LOSS
        return _BACKWARD if scopes.in_backward() else _FORWARD

    def live_bytes(self, owner: str | None = None, place: str = "device") -> int:
        """Bytes alive now, of one owner or of all."""
        self.drain()
        held = self._held.values()
        return sum(h.num_bytes for h in held if h.place == place and owner in (None, self._owner[h.index]))

    def ledger(self, since: str | None = None) -> Ledger:
        """The peak and who held it, the most each owner ever held, the host's bytes; from the last mark `since` on."""
        self.drain()
        first = self._first(since)
        owners, held = self._fold("device")
        total = held[:, first:].sum(axis=0)
        top = first + int(total.argmax()) if total.size else 0
        holders = _at(owners, held, top)
        own = sum(holders.values())
        peak = max(own, self._caching.peak_bytes if since is None else 0)
        if peak > own:  # scratch inside operators and what no operator touched: the caching allocator knows
            holders["other"] = holders.get("other", 0) + peak - own
        host_owners, host = self._fold("host")
        host_total = host[:, first:].sum(axis=0)
        host_top = first + int(host_total.argmax()) if host_total.size else 0
        most = {owner: int(row[first:].max(initial=0)) for owner, row in zip(owners, held, strict=True)}
        return Ledger(
            device_peak_bytes=peak,
            holders=holders,
            peaks={**dict.fromkeys(PEAKS, 0), **{owner: size for owner, size in most.items() if size}},
            host_bytes=int(host_total.max(initial=0)),
            host_holders=_at(host_owners, host, host_top),
            reserved_bytes=self._caching.reserved_bytes,
            moment=str(_MOMENTS[self._moment[top]]) if len(self._moment) else "",
        )

    def timeline(self, since: str | None = None) -> Timeline:
        """The device's bytes by owner after every change; marks are the phases of the step and those that were made."""
        self.drain()
        first = self._first(since)
        owners, held = self._fold("device")
        when = np.maximum.accumulate(_ints(self._when)[first:]) if len(self._when) > first else _ints(array("q"))
        start = self._start_ns if since is None else self._marked(since)[1]
        made = [((at - start) / 1e9, name) for index, at, name in self._marks if index >= first]
        seconds = (when - start) / 1e9
        return Timeline(owners, seconds, held[:, first:], tuple(sorted([*made, *self._phases(seconds, first)])))

    def _phases(self, seconds: Floats, first: int) -> list[tuple[float, str]]:
        """Where forward, loss, backward and update begin, told by what is born."""
        births = np.flatnonzero(_ints(self._delta)[first:] > 0)
        moments = np.frombuffer(self._moment, dtype=np.int8)[first:][births]
        return [(at, str(_MOMENTS[code])) for at, code in phases(moments, seconds[births])]

    def _fold(self, place: str) -> tuple[tuple[str, ...], Ints]:
        here = np.fromiter((p == place for p in self._place), dtype=np.bool_, count=len(self._place))
        which = _ints(self._which)
        deltas = np.where(here[which], _ints(self._delta), 0) if which.size else _ints(array("q"))
        names = [self._owner[i] if here[i] else "other" for i in self._which]
        return fold(names, deltas)

    def _first(self, since: str | None) -> int:
        # The state at a mark is that after the last change before it.
        return 0 if since is None else max(0, self._marked(since)[0] - 1)

    def _marked(self, name: str) -> tuple[int, int, str]:
        found = [mark for mark in self._marks if mark[2] == name]
        if not found:
            raise KeyError(f"no mark {name!r}; there are {[mark[2] for mark in self._marks]}")
        return found[-1]


class _CachingAllocator:
    """The accelerator's own count of a stretch, allocated and reserved; nothing on the CPU."""

    def __init__(self, device_type: str) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self._device = found if found is not None and found.type == device_type else None
        self.peak_bytes = 0
        self.reserved_bytes: int | None = None

    def start(self) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
            torch.accelerator.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
            self.peak_bytes = torch.accelerator.max_memory_allocated(self._device)
            self.reserved_bytes = torch.accelerator.max_memory_reserved(self._device)


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, dtype=np.int64)


def _at(owners: tuple[str, ...], held: Ints, column: int) -> dict[str, int]:
    if not held.shape[1]:
        return {}
    return {owner: int(held[i, column]) for i, owner in enumerate(owners) if held[i, column]}
