"""Which boundary goes where: pure functions over integers.

Times are integer nanoseconds, sizes are bytes. The model of time: a boundary leaves behind the forward of the block
after it and comes back behind the recompute and backward of the block after it; only what doesn't fit there is paid.
A boundary that is recomputed costs the forwards from the nearest stored boundary before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Choice = Literal["offload", "keep", "recompute"]
CHOICES: Final[tuple[Choice, ...]] = ("offload", "keep", "recompute")
LONGEST_RUN: Final = 4  # recomputed boundaries in a row; their cost grows with the square


def device_boundaries(choices: Sequence[Choice]) -> tuple[int, int]:
    """Boundaries that stay on the device from forward to backward, and those in transit beside them (0 or 1).

    The last boundary stays unless it is recomputed. Anything that comes back, by the link or by a recompute, is one
    boundary in transit.
    """
    last = len(choices) - 1
    held = sum(_stays(choice, index == last) for index, choice in enumerate(choices))
    return held, int(held < len(choices))


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
    return BoundaryPlan(tuple(choices), added, device + moving, host)


def plan(boundaries: Boundaries, device_budget: int, host_budget: int) -> BoundaryPlan | NoPlan:
    """The fastest assignment under both budgets; among equally fast ones the least device, then host bytes.

    A dynamic programme over the boundaries: labels (device held, largest in transit, host, last stored boundary) with
    the least time each; labels that another one beats in everything are dropped, so that equal blocks stay few.
    """
    found = _search(boundaries, device_budget, host_budget)
    return _shortfall(boundaries, device_budget, host_budget) if found is None else found


def _search(boundaries: Boundaries, device_budget: int, host_budget: int) -> BoundaryPlan | None:
    labels: _Labels = {_State(0, 0, 0, 0): (0, ())}
    for index in range(len(boundaries.sizes)):
        grown: _Labels = {}
        for state, (added, chosen) in labels.items():
            for choice, after, more in _steps(boundaries, state, index):
                if after.device + after.moving > device_budget or after.host > host_budget:
                    continue
                offer = (added + more, (*chosen, choice))
                if after not in grown or offer[0] < grown[after][0]:
                    grown[after] = offer
        labels = _undominated(grown)
    plans = [cost(boundaries, chosen) for _, chosen in labels.values()]
    return min(plans, key=lambda p: (p.added_ns, p.device_bytes, p.host_bytes), default=None)


@dataclass(frozen=True)
class _State:
    device: int
    moving: int
    host: int
    stored: int  # index of the nearest stored boundary


_Labels = dict[_State, tuple[int, tuple[Choice, ...]]]  # the least time to a state, and the choices that lead there


def _steps(boundaries: Boundaries, state: _State, index: int) -> Iterator[tuple[Choice, _State, int]]:
    size, last = boundaries.sizes[index], len(boundaries.sizes) - 1
    moving = max(state.moving, size)
    yield "keep", _State(state.device + size, state.moving, state.host, index), 0
    if index < last:
        yield "offload", _State(state.device, moving, state.host + size, index), boundaries.stall_ns(index)
    if index and index - state.stored <= LONGEST_RUN:
        more = boundaries.replay_ns(state.stored, index)
        yield "recompute", _State(state.device, moving, state.host, state.stored), more


def _undominated(labels: _Labels) -> _Labels:
    """Drop every label that another with the same last stored boundary equals or beats in time and in all bytes."""
    kept: _Labels = {}
    by_stored: dict[int, list[tuple[int, int, int, int]]] = {}
    order = sorted(labels.items(), key=lambda item: (item[1][0], item[0].device, item[0].moving, item[0].host))
    for state, offer in order:
        point = (offer[0], state.device, state.moving, state.host)
        rivals = by_stored.setdefault(state.stored, [])
        if not any(all(a <= b for a, b in zip(rival, point, strict=True)) for rival in rivals):
            rivals.append(point)
            kept[state] = offer
    return kept


def _shortfall(boundaries: Boundaries, device_budget: int, host_budget: int) -> NoPlan:
    """The least device bytes under the host budget, by bisection: what fits a budget fits every larger one."""
    low, high = device_budget + 1, sum(boundaries.sizes)  # keeping everything needs no host
    while low < high:
        middle = (low + high) // 2
        if _search(boundaries, middle, host_budget) is not None:
            high = middle
        else:
            low = middle + 1
    return NoPlan(low, low - device_budget)


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
