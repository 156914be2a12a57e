"""Crossings and their chain: what one call of a checkpointed block leaves behind, and who came before it.

A `Crossing` is one boundary in one forward. The chain links crossings in the order of their forwards, by weak
references only: a link is a hint about what to send and what to fetch next, never a claim on memory, so that several
forwards in flight, a backward that stops half-way, or one that never comes cost nothing but a late reload.

Note [One behind, one ahead]
In forward a boundary leaves when the next one appears, so the last one never does, and the one before that has left
before a third appears. In backward the first handle that is unpacked fetches its predecessor too, before the recompute
is enqueued. At most one fetched boundary waits for its turn, whatever order the graphs run in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import torch

from steppe.flatteners.boundary.parcels import Parcel, Transit
from steppe.flatteners.boundary.schedule import Choice

if TYPE_CHECKING:
    from steppe.flatteners.boundary.replay import Replay


class Crossing:
    """One boundary in one forward: its choice, its parcels, its predecessor."""

    def __init__(self, chain: Chain, index: int | None, choice: Choice) -> None:
        self.chain, self.index, self.choice = chain, index, choice
        self.number = chain.next_number()
        self.previous: ReferenceType[Crossing] | None = None
        self.source: Crossing | None = None  # of a recomputed boundary: whose block makes it again
        self._held: dict[ReferenceType[Parcel], int] = {}  # parcel -> handles of this crossing on it

    def hold(self, tensor: torch.Tensor, *, stays: bool) -> Parcel:
        """The parcel of `tensor`: one that covers it already, or a new one."""
        parcel = self.chain.find(tensor)
        if parcel is None:
            parcel = self.chain.open(tensor)
        elif parcel.newest != self.number:
            parcel.meet_again(tensor)
        parcel.newest = self.number
        parcel.stays |= stays
        self._held[ref(parcel)] = self._held.get(ref(parcel), 0) + 1
        return parcel

    def ship(self) -> None:
        for parcel, _ in self._living():
            parcel.ship(self.number)

    def retire(self) -> None:
        for parcel, _ in self._living():
            parcel.retire(self.number)

    def fetch(self) -> None:
        if self.source is not None:
            self.source.fetch()
        for parcel, handles in self._living():
            parcel.fetch(self.number, handles)

    def cancel(self) -> None:
        if self.source is not None:
            self.source.cancel()
        for parcel, _ in self._living():
            parcel.cancel(self.number)

    def _living(self) -> Iterator[tuple[Parcel, int]]:
        for reference, handles in list(self._held.items()):
            parcel = reference()
            if parcel is not None:
                yield parcel, handles


class Chain:
    """The crossings of one SCO, newest last."""

    def __init__(self, transit: Transit) -> None:
        self.transit = transit
        self.offer: Replay | None = None  # how to make the newest block's output again
        self.passed = 0  # boundaries to be offloaded that a newer one has followed: something must have moved
        self.backwards = 0  # crossings that a backward has reached
        self._numbers = 0
        self._last = self._leaving = self._arrived = self._ahead = _nobody
        self._parcels: dict[int, list[ReferenceType[Parcel]]] = {}

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def find(self, tensor: torch.Tensor) -> Parcel | None:
        for reference in self._parcels.get(tensor.untyped_storage()._cdata, ()):
            parcel = reference()
            if parcel is not None and parcel.covers(tensor):
                return parcel
        return None

    def open(self, tensor: torch.Tensor) -> Parcel:
        parcel = Parcel(self.transit, tensor)
        self._parcels.setdefault(tensor.untyped_storage()._cdata, []).append(ref(parcel))
        return parcel

    def advance(self, crossing: Crossing) -> None:
        """`crossing` is the newest now: the one before it leaves, and the one before that is gone from the device."""
        self.transit.sweep()
        self.settle()
        last = self._last()
        if last is not None:
            last.ship()
            self.passed += last.choice == "offload"
        crossing.previous, self._leaving, self._last = self._last, self._last, ref(crossing)
        self._parcels = {
            key: living for key, refs in self._parcels.items() if (living := [r for r in refs if r() is not None])
        }

    def settle(self) -> None:
        """What is leaving has left: the compute stream waits for it and its device memory is free."""
        leaving, self._leaving = self._leaving(), _nobody
        if leaving is not None:
            leaving.retire()

    def arrive(self, crossing: Crossing) -> None:
        """A handle of `crossing` is unpacked: all of it is fetched, and its predecessor behind it."""
        if self._arrived() is crossing:
            return
        self._arrived = ref(crossing)
        self.backwards += 1
        crossing.fetch()
        previous = crossing.previous() if crossing.previous is not None else None
        ahead, self._ahead = self._ahead(), _nobody if previous is None else ref(previous)
        if ahead is not None and ahead is not crossing and ahead is not previous:
            ahead.cancel()
        if previous is not None:
            previous.fetch()
        self.transit.sweep()


def _nobody() -> Crossing | None:
    return None
