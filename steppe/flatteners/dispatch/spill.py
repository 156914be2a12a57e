"""Travelling experts: weights out to helpers one group ahead, float32 gradients home in a fixed order.

Everything is posted at chunks that follow from the layout, the same on all ranks; a rank with nothing to send or
receive posts nothing, and its peers know it.

Note [gradients home]
A helper posts its sums when the group ends and waits for that only before the set is used again, two groups later. The
owner drains them at the end of the chunk after, one receive slot at a time, before that chunk's own posts. Postponing
it further can deadlock: the helper would wait for its send, and the owner for the helper in the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

from steppe.core.errors import CollectiveTimeout
from steppe.flatteners.dispatch.gradients import NativeSums, SlotSums
from steppe.flatteners.dispatch.routes import Routes, Session
from steppe.flatteners.dispatch.schedule import Layout
from steppe.flatteners.dispatch.weights import ExpertStack
from steppe.flatteners.dispatch.workspace import SpillSlots
from steppe.runtime import collectives


@dataclass(frozen=True)
class Trip:
    """One foreign expert: from its owner to a helper, used by the helper's group in chunks [first, last]."""

    expert: int
    owner: int
    helper: int
    group: int
    place: int  # in its group
    posted: int  # chunk at which its weights are posted: the first one of the group before
    first: int
    last: int


def trips(layout: Layout) -> list[Trip]:
    """All trips of a plan in the order (helper, group, place)."""
    plan = layout.plan
    found = []
    for piece in (plan.owner != plan.dest).nonzero()[0].tolist():
        run = int(layout.run[piece])
        helper, first = int(plan.dest[piece]), int(layout.first_chunk[run])
        group = run - int(layout.run_dest.searchsorted(helper))
        place = piece - int(layout.run.searchsorted(run))
        found.append(
            Trip(
                int(plan.expert[piece]), int(plan.owner[piece]), helper, group, place,
                posted=int(layout.first_chunk[run - 1]), first=first, last=first + int(layout.num_chunks[run]) - 1,
            )
        )  # fmt: skip
    return found


class Travel:
    """The trips of one pass, seen from one rank; `natives` are its own weights."""

    def __init__(self, routes: Routes, natives: ExpertStack, session: Session, what: str) -> None:
        self.session, self.natives, self.what = session, natives, what
        self.routes, self.rank = routes, session.rank
        self.trips = trips(routes.layout)
        self.slots: SpillSlots | None = None
        if session.num_ranks > 1:
            self.slots = session.pool.slots(natives.form, session.policy.spill_slots, natives.gate_up)
        self.arriving: dict[int, collectives.Pending] = {}
        self.leaving: list[collectives.Pending] = []

    def stack(self, group: int) -> ExpertStack:
        """Weights of a group: the natives, or the set that the group came into."""
        return self.natives if group == 0 else self._set(group)

    def before(self, chunk: int) -> None:
        """Post the weights due at this chunk; wait for those of a group that begins now."""
        due = [trip for trip in self.trips if trip.posted == chunk]
        if due:
            self._post(due)
        if any(trip.helper == self.rank and trip.first == chunk for trip in self.trips):
            self._wait(self.arriving.pop(self._group_at(chunk)), chunk)

    def after(self, chunk: int) -> None:
        """Forward: nothing goes home but rows."""

    def finish(self) -> None:
        """All weights have left: they may change, or be resharded."""
        for pending in self.leaving:
            self._wait(pending, self.routes.layout.chunks - 1)
        self.leaving.clear()

    def _post(self, due: list[Trip]) -> None:
        for trip in due:
            sends = [(t, trip.helper) for t in self.natives.of(self._local(trip))] if trip.owner == self.rank else []
            receives = []
            if trip.helper == self.rank:
                receives = [(t, trip.owner) for t in self._set(trip.group).of(trip.place)]
            if not sends and not receives:
                continue
            self.session.pool.pause()
            pending = self._exchange(sends, receives, f"weights of expert {trip.expert}")
            if receives:
                before = self.arriving.get(trip.group)
                self.arriving[trip.group] = pending if before is None else _Both(before, pending)
            else:
                self.leaving.append(pending)
                self.session.pool.counters["weights_sent"] += 1
        self._count_alive(due)

    def _count_alive(self, due: list[Trip]) -> None:
        """Foreign experts alive here: those arriving and those of the group in use."""
        arriving = [trip for trip in due if trip.helper == self.rank]
        if arriving:
            in_use = [t for t in self.trips if t.helper == self.rank and t.group == arriving[0].group - 1]
            alive = len(arriving) + len(in_use)
            counters = self.session.pool.counters
            counters["most_foreign_alive"] = max(counters["most_foreign_alive"], alive)

    def _set(self, group: int) -> ExpertStack:
        assert self.slots is not None
        return self.slots.weights[group % 2]

    def _local(self, trip: Trip) -> int:
        return trip.expert - self.rank * self.routes.layout.plan.num_native

    def _group_at(self, chunk: int) -> int:
        return self.routes.receives.group[chunk]

    def _exchange(
        self, sends: list[collectives.Message], receives: list[collectives.Message], what: str
    ) -> collectives.Pending:
        group = self.session.transfers or self.session.group
        return collectives.exchange(sends, receives, group, f"{self.what}, {what}")

    def _wait(self, pending: collectives.Pending, chunk: int) -> None:
        self.session.pool.pause()
        try:
            pending.wait(self.session.pool.wait_limit_s(self.natives.gate_up.device))
        except CollectiveTimeout as late:
            raise CollectiveTimeout(f"{late}, at chunk {chunk}") from late


class ReturnTravel(Travel):
    """The backward's trips: weights out again, gradients home (Note [gradients home])."""

    def __init__(self, routes: Routes, natives: ExpertStack, session: Session, what: str, sums: NativeSums) -> None:
        super().__init__(routes, natives, session, what)
        self.native_sums = sums
        self.homeward: dict[int, list[collectives.Pending]] = {0: [], 1: []}

    def sums(self, group: int) -> NativeSums | SlotSums:
        """Where the gradients of a group are added up."""
        return self.native_sums if group == 0 else self._slot_sums(group)

    def before(self, chunk: int) -> None:
        super().before(chunk)
        group = self._group_at(chunk)
        if group and self.routes.receives.group_chunks[group][0] == chunk:
            self._free(group % 2, chunk)
            self._slot_sums(group).clear()

    def after(self, chunk: int) -> None:
        self._drain(chunk - 1)
        for trip in self.trips:
            if trip.helper == self.rank and trip.last == chunk:
                self.session.pool.pause()
                parts = [(t, trip.owner) for t in self._slot_sums(trip.group).slots.of(trip.place)]
                what = f"gradients of expert {trip.expert}"
                self.homeward[trip.group % 2].append(self._exchange(parts, [], what))
                self.session.pool.counters["gradients_sent"] += 1

    def finish(self) -> None:
        last = self.routes.layout.chunks - 1
        self._drain(last)
        for half in (0, 1):
            self._free(half, last)
        super().finish()

    def _drain(self, ended: int) -> None:
        for trip in self.trips:
            if trip.owner == self.rank and trip.last == ended:
                assert self.slots is not None
                home = self.slots.home
                receives = [(t, trip.helper) for t in home.of(0)]
                self._wait(self._exchange([], receives, f"gradients of expert {trip.expert}"), ended + 1)
                self.native_sums.add_from_helper(self._local(trip), home)

    def _free(self, half: int, chunk: int) -> None:
        for pending in self.homeward[half]:
            self._wait(pending, chunk)
        self.homeward[half].clear()

    def _slot_sums(self, group: int) -> SlotSums:
        assert self.slots is not None
        return SlotSums(self.slots.sums[group % 2])


class _Both(collectives.Pending):
    """Two pendings as one."""

    def __init__(self, first: collectives.Pending, second: collectives.Pending) -> None:
        self.parts = (first, second)

    def wait(self, timeout_s: float | None = None) -> None:
        for part in self.parts:
            part.wait(timeout_s)
