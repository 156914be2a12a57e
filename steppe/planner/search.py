"""The fastest plan that fits: every layout, every subset of the flatteners that pay, and why each is on or off.

Candidates are fixed by the job alone, never by how much memory there is, so more memory only adds plans that fit:
it can't make the chosen plan slower or the longest context shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from steppe.core.policy import OFF, Off, Verdict
from steppe.core.shapes import RunShape
from steppe.core.units import format_bytes
from steppe.flatteners import DECISION_ORDER, NAMES, half
from steppe.planner.layouts import Job, layouts
from steppe.planner.plan import policy_class
from steppe.planner.predict import PLAIN, Forecast, Policies, forecast, hidden_parts, is_plain, recompute_seconds
from steppe.planner.steptime import StepTime, least_seconds, step_time


@dataclass(frozen=True)
class Candidate:
    """One layout under one program: what it holds, how long a step takes, by how many bytes it misses."""

    shape: RunShape
    policies: Policies
    forecast: Forecast

    @cached_property
    def time(self) -> StepTime:
        """Asked for only where the candidate fits, which most of a search's don't."""
        hidden, again = hidden_parts(self.policies), recompute_seconds(self.shape, self.policies)
        return step_time(self.shape, self.forecast.ledger, hidden, again)

    @property
    def device_missing(self) -> int:
        return max(0, self.forecast.device_peak_bytes - self.shape.machine.device_memory_bytes)

    @property
    def host_missing(self) -> int:
        return max(0, self.forecast.host_bytes_per_node - self.shape.machine.host_memory_bytes)

    @property
    def fits(self) -> bool:
        return not (self.device_missing or self.host_missing)

    @property
    def num_on(self) -> int:
        return sum(not isinstance(policy, Off) for policy in self.policies.values())


def candidate(shape: RunShape, policies: Policies, without: frozenset[str] = frozenset()) -> Candidate:
    return Candidate(shape, policies, forecast(shape, policies, without=without))


@dataclass(frozen=True)
class Switch:
    """One flattener, on or off, and the sentence that says why."""

    flattener: str
    on: bool
    why: str


def policies_of(name: str) -> tuple[Any, ...]:
    """The policies that a search tries when this flattener is on: its own choices, or its defaults."""
    choices = getattr(half(name, "budget"), "choices", None)
    return tuple(choices()) if choices is not None else (policy_class(name)(),)


def verdicts(shape: RunShape, *, pressed: bool = False) -> dict[str, Verdict]:
    """What each flattener says of the shape; `pressed`: as if memory were short, so that only what can never pay
    on this model and machine is refused."""
    machine = replace(shape.machine, device_memory_bytes=1) if pressed else shape.machine
    seen = replace(shape, machine=machine)
    return {name: half(name, "budget").pays(seen, machine) for name in NAMES}


def programs(job: Job, shape: RunShape) -> tuple[Policies, ...]:
    """The programs that may run: the subsets of what pays when memory is short, those that are forced in each."""
    forced = dict(job.forced)
    may = {name: verdict.on for name, verdict in verdicts(shape, pressed=True).items()}
    ways = []
    for name in DECISION_ORDER:
        on, off = policies_of(name), (OFF,)
        ways.append((on if forced[name] else off) if name in forced else (*off, *on) if may[name] else off)
    return tuple(dict(zip(DECISION_ORDER, way, strict=True)) for way in itertools.product(*ways))


def search(job: Job) -> Candidate:
    """The fastest candidate that fits, the fewest switches among equally fast; the smallest one when none fits."""
    return tuned(job, _best(job, lambda shape: programs(job, shape)))


def works(job: Job) -> bool:
    """Whether some plan fits, on the layouts that leave each rank the fewest tokens; the one with most switches first.

    The answer that `search` gives, without looking for the fastest one.
    """
    smallest: Candidate | None = None
    for shape in tuple(layouts(job, longest_first=True))[::-1]:
        for policies in programs(job, shape)[::-1]:
            seen = candidate(shape, policies, job.without)
            if seen.fits:
                return True
            if smallest is None or _need(seen) < _need(smallest):
                smallest = seen
    return smallest is not None and tuned(job, smallest).fits


def tuned(job: Job, seen: Candidate) -> Candidate:
    """Flatteners that can fit themselves into the room that the others leave do so, where that costs no time.

    Their budget's `fitted(shape, machine, device_room, host_room)` gives the policy, from the machine's rates.
    """
    for name in NAMES:
        fitted = getattr(half(name, "budget"), "fitted", None)
        if fitted is None or isinstance(seen.policies[name], Off):
            continue
        policy = fitted(seen.shape, seen.shape.machine, *_room(seen, name, job.without))
        if policy is not None:
            offer = candidate(seen.shape, {**seen.policies, name: policy}, job.without)
            if offer.fits and (not seen.fits or offer.time.seconds <= seen.time.seconds):
                seen = offer
    return seen


def _room(seen: Candidate, name: str, without: frozenset[str]) -> tuple[int, int]:
    """Bytes of one rank's device and host that everything but this flattener leaves."""
    own = {entry.tensor for entry in half(name, "budget").entries(seen.shape, seen.policies[name])}
    others = forecast(seen.shape, seen.policies, without=without | own)
    machine, mesh = seen.shape.machine, seen.shape.mesh
    host = (machine.host_memory_bytes - others.host_bytes_per_node) // min(mesh.ranks_per_node, mesh.world)
    return max(0, machine.device_memory_bytes - others.device_peak_bytes), max(0, host)


def search_plain(job: Job) -> Candidate:
    """The same for the plain program: its own strongest layout."""
    return _best(job, lambda _: (PLAIN,))


def _best(job: Job, ways: Callable[[RunShape], tuple[Policies, ...]]) -> Candidate:
    """Layouts in order of what they take at least; none can win once that is longer than the best that fits."""
    best: Candidate | None = None
    smallest: Candidate | None = None
    for shape in sorted(layouts(job), key=least_seconds):
        if best is not None and least_seconds(shape) > best.time.seconds:
            break
        for policies in ways(shape):
            seen = candidate(shape, policies, job.without)
            if seen.fits and (best is None or _rank(seen) < _rank(best)):
                best = seen
            if smallest is None or _need(seen) < _need(smallest):
                smallest = seen
    found = best or smallest
    assert found is not None, "a job has at least one layout"
    return found


def _rank(seen: Candidate) -> tuple[float, int, int]:
    return (seen.time.seconds, seen.num_on, seen.forecast.device_peak_bytes)


def _need(seen: Candidate) -> tuple[int, int]:
    return (seen.device_missing + seen.host_missing, seen.forecast.device_peak_bytes)


def switches(job: Job, chosen: Candidate) -> tuple[Switch, ...]:
    """Why each flattener is on or off in the chosen plan, in the method's decision order."""
    judged = verdicts(chosen.shape)
    pressed = verdicts(chosen.shape, pressed=True)
    return tuple(_switch(name, job, chosen, judged[name], pressed[name]) for name in DECISION_ORDER)


def _switch(name: str, job: Job, chosen: Candidate, now: Verdict, pressed: Verdict) -> Switch:
    on = not isinstance(chosen.policies[name], Off)
    if name in dict(job.forced):
        return Switch(name, on, f"{'on' if on else 'off'} because it was asked for; {now.why}")
    if on:
        return Switch(name, True, f"{_saving(name, job, chosen)}; {now.why}")
    if pressed.on and chosen.fits:
        room = chosen.shape.machine.device_memory_bytes - chosen.forecast.device_peak_bytes
        return Switch(name, False, f"not needed: the run fits with {format_bytes(room)} to spare; {now.why}")
    if pressed.on:
        return Switch(name, False, f"{_no_help(name, job, chosen)}; {now.why}")
    return Switch(name, False, now.why)


def _no_help(name: str, job: Job, chosen: Candidate) -> str:
    """Why a switch that can pay is off in a run that doesn't fit whatever is on."""
    with_it = candidate(chosen.shape, {**chosen.policies, name: policies_of(name)[0]}, job.without)
    what = [
        f"the {place} still misses {format_bytes(missing)}"
        for place, missing in (("device", with_it.device_missing), ("host", with_it.host_missing))
        if missing
    ]
    return f"no help: with it {' and '.join(what) or 'nothing fits sooner'}"


def _saving(name: str, job: Job, chosen: Candidate) -> str:
    without = candidate(chosen.shape, {**chosen.policies, name: OFF}, job.without)
    plain, flat = (c.forecast.ledger.peaks.get(name, 0) for c in (without, chosen))
    told = f"{name} peak {format_bytes(plain)} -> {format_bytes(flat)}"
    if without.fits:
        return f"{told}, and the step is {without.time.seconds / chosen.time.seconds:.2f}x as fast"
    if without.device_missing:
        return f"{told}; without it the device misses {format_bytes(without.device_missing)}"
    return f"{told}; without it the host misses {format_bytes(without.host_missing)}"


def plain_is_enough(chosen: Candidate) -> bool:
    return chosen.fits and is_plain(chosen.policies)
