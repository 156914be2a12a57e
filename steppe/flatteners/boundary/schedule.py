"""Which boundary goes where: pure functions over integers.

Times are integer nanoseconds, sizes are bytes. The model of time: a boundary leaves behind the forward of the block
after it and comes back behind the recompute and backward of the block after it; only what doesn't fit there is paid.
A boundary that is recomputed costs the forwards from the nearest stored boundary before it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Choice = Literal["offload", "keep", "recompute"]
CHOICES: Final[tuple[Choice, ...]] = ("offload", "keep", "recompute")
LONGEST_RUN: Final = 4  # recomputed boundaries in a row; their cost grows with the square


def device_boundaries(choices: Sequence[Choice]) -> tuple[int, int]:
    """Boundaries that stay on the device from forward to backward, and those in transit beside them (0, 1 or 2).

    The last boundary stays and one comes back beside it, or takes its place once it is gone. A last boundary that is
    recomputed stands beside the one it is made from: two in transit, so that recomputing it frees nothing.
    """
    last = len(choices) - 1
    held = sum(_stays(choice, index == last) for index, choice in enumerate(choices))
    if held == len(choices):
        return held, 0
    return held, 1 if choices[last] != "recompute" else 2


def stored_on_host(choices: Sequence[Choice]) -> int:
    """Boundaries that lie on the host: all that are offloaded, but for the last."""
    return sum(choice == "offload" for choice in choices[:-1])


def _stays(choice: Choice, is_last: bool) -> bool:
    return choice == "keep" or (is_last and choice == "offload")


@dataclass(frozen=True)
class Boundaries:
    """L boundaries: their bytes, each block's forward and (recompute and) backward time, and the link's rates."""

    sizes: tuple[int, ...]
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    to_host_rate: int  # bytes per second
    to_device_rate: int

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.forward_ns) == len(self.backward_ns)

    def stall_ns(self, index: int) -> int:
        """Time that offloading boundary `index` adds: what the next block can't hide, each way."""
        size, later = self.sizes[index], index + 1
        out = size * 10**9 // self.to_host_rate - self.forward_ns[later]
        back = size * 10**9 // self.to_device_rate - self.backward_ns[later]
        return max(0, out) + max(0, back)

    def replay_ns(self, stored: int, index: int) -> int:
        """Time that recomputing boundary `index` from the boundary `stored` adds."""
        return sum(self.forward_ns[stored:index])


@dataclass(frozen=True)
class BoundaryPlan:
    """A choice for every boundary, and what it costs."""

    choices: tuple[Choice, ...]
    added_ns: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class NoPlan:
    """No choice fits: the least that the device must hold, and how many bytes are missing."""

    least_device_bytes: int
    missing_bytes: int


def cost(boundaries: Boundaries, choices: Sequence[Choice]) -> BoundaryPlan:
    """Price one assignment: added time, device bytes (held, and the largest in transit) and host bytes."""
    added = device = host = moving = stored = 0
    last = len(choices) - 1
    for index, choice in enumerate(choices):
        size = boundaries.sizes[index]
        if choice == "recompute":
            added += boundaries.replay_ns(stored, index)
        else:
            stored = index
        if _stays(choice, index == last):
            device += size
        else:
            moving = max(moving, size)
        if choice == "offload" and index < last:
            added += boundaries.stall_ns(index)
            host += size
    return BoundaryPlan(tuple(choices), added, device + device_boundaries(choices)[1] * moving, host)


def plan(boundaries: Boundaries, device_budget: int, host_budget: int) -> BoundaryPlan | NoPlan:
    """The fastest assignment under both budgets; among equally fast ones the least device, then host bytes.

    A dynamic programme over the boundaries: labels (device held, largest in transit, host, last stored boundary) with
    the least time each; labels that another one beats in everything are dropped, so that equal blocks stay few.
    """
    found = _search(boundaries, device_budget, host_budget)
    return _shortfall(boundaries, device_budget, host_budget) if found is None else found


class _State(NamedTuple):
    device: int
    moving: int
    host: int
    stored: int  # index of the nearest stored boundary


class _Path(NamedTuple):
    """Choices, newest first: paths share their beginnings."""

    choice: Choice
    before: _Path | None


_Labels = dict[_State, tuple[int, _Path | None]]  # the least time to a state, and the choices that lead there


def _search(boundaries: Boundaries, device_budget: int, host_budget: int) -> BoundaryPlan | None:
    labels = _advance(boundaries, device_budget, host_budget, timed=True)
    plans = [cost(boundaries, _unrolled(path)) for _, path in labels.values()]
    return min(plans, key=lambda p: (p.added_ns, p.device_bytes, p.host_bytes), default=None)


def _advance(boundaries: Boundaries, device_budget: int, host_budget: int, *, timed: bool) -> _Labels:
    labels: _Labels = {_State(0, 0, 0, 0): (0, None)}
    for index in range(len(boundaries.sizes)):
        grown: _Labels = {}
        for state, (added, path) in labels.items():
            for choice, after, more in _steps(boundaries, state, index):
                if after.device + after.moving > device_budget or after.host > host_budget:
                    continue
                time_ns = added + more if timed else 0
                if after not in grown or time_ns < grown[after][0]:
                    grown[after] = time_ns, _Path(choice, path)
        labels = _undominated(grown)
    return labels


def _steps(boundaries: Boundaries, state: _State, index: int) -> Iterator[tuple[Choice, _State, int]]:
    size, last = boundaries.sizes[index], len(boundaries.sizes) - 1
    moving = max(state.moving, size)
    yield "keep", _State(state.device + size, state.moving, state.host, index), 0
    if index < last:
        yield "offload", _State(state.device, moving, state.host + size, index), boundaries.stall_ns(index)
    if 0 < index < last and index - state.stored <= LONGEST_RUN:  # the last one's recompute would free nothing
        more = boundaries.replay_ns(state.stored, index)
        yield "recompute", _State(state.device, moving, state.host, state.stored), more


def _undominated(labels: _Labels) -> _Labels:
    """Drop every label that another with the same last stored boundary equals or beats in time and in all bytes.

    Labels come in order of time, so a rival among those before needs to beat the bytes alone: one staircase of
    (device, host) for every size in transit.
    """
    kept: _Labels = {}
    stairs: dict[int, dict[int, _Staircase]] = {}
    for state, offer in sorted(labels.items(), key=lambda item: (item[1][0], item[0])):
        rivals = stairs.setdefault(state.stored, {})
        if any(moving <= state.moving and rival.beats(state) for moving, rival in rivals.items()):
            continue
        rivals.setdefault(state.moving, _Staircase()).add(state)
        kept[state] = offer
    return kept


class _Staircase:
    """Points that no other one beats, by rising device and so falling host bytes."""

    def __init__(self) -> None:
        self._device: list[int] = []
        self._host: list[int] = []

    def beats(self, state: _State) -> bool:
        """Whether a point holds no more than this state, on device and host."""
        place = bisect_right(self._device, state.device)
        return place > 0 and self._host[place - 1] <= state.host

    def add(self, state: _State) -> None:
        first = last = bisect_left(self._device, state.device)
        while last < len(self._host) and self._host[last] >= state.host:
            last += 1
        self._device[first:last] = [state.device]
        self._host[first:last] = [state.host]


def _unrolled(path: _Path | None) -> tuple[Choice, ...]:
    choices: list[Choice] = []
    while path is not None:
        choices.append(path.choice)
        path = path.before
    return tuple(reversed(choices))


def _shortfall(boundaries: Boundaries, device_budget: int, host_budget: int) -> NoPlan:
    """The least device bytes under the host budget, whatever they cost in time."""
    everything = sum(boundaries.sizes) + max(boundaries.sizes, default=0)
    labels = _advance(boundaries, everything, host_budget, timed=False)
    least = min(state.device + state.moving for state in labels)
    return NoPlan(least, least - device_budget)


@dataclass(frozen=True)
class Candidate:
    """One operator whose results could be kept: measured in one block."""

    operator: str
    num_bytes: int
    recompute_ns: int
    reload_ns: int
    choice: Literal["keep", "recompute"] = "recompute"
    why: str = ""

    @property
    def pays(self) -> bool:
        return self.recompute_ns > self.reload_ns


def reload_ns(num_bytes: int, to_device_rate: float) -> int:
    return round(num_bytes * 1e9 / to_device_rate)


def rank_candidates(candidates: Sequence[Candidate], limit: int) -> tuple[Candidate, ...]:
    """Candidates by recompute time saved per byte moved, best first, with the choice and its reason.

    Taken are those whose recompute takes longer than their reload, up to `limit`."""
    order = sorted(candidates, key=lambda c: (-c.recompute_ns / max(1, c.num_bytes), c.operator))
    ranked: list[Candidate] = []
    taken = 0
    for candidate in order:
        keep = candidate.pays and taken < limit
        taken += keep
        if keep:
            why = "recompute takes longer than reload"
        elif candidate.pays:
            why = f"pays, but {limit} are kept already"
        else:
            why = "reload takes as long as recompute or longer"
        ranked.append(
            Candidate(candidate.operator, candidate.num_bytes, candidate.recompute_ns, candidate.reload_ns,
                      "keep" if keep else "recompute", why)
        )  # fmt: skip
    return tuple(ranked)
