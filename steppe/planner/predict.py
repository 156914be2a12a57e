"""The ledger of a run before it starts: a fold of entries that each name one tensor.

A program is a mapping from flattener to policy; OFF everywhere is the plain program. The flatteners' `budget` files
give the entries of their own peak, `sharding` and `block` those that every program has. A flattener may say which of
the latter it makes needless (`replaces`), so nothing here knows one by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from steppe.core.ledger import BLOCK_BACKWARD, HEAD_GATHERED, MLP_BACKWARD, PEAKS, STEP, Entry, Ledger, Moment
from steppe.core.policy import OFF, Off
from steppe.core.shapes import RunShape
from steppe.flatteners import NAMES, half
from steppe.planner.block import block_entries, router_loss_entries
from steppe.planner.sharding import own_head_entries, sharding_entries, with_own_head

Policies = Mapping[str, Any]
PLAIN: Final[Policies] = dict.fromkeys(NAMES, OFF)
SEGMENT_BYTES: Final = 2 * 2**20  # torch's CUDA allocator asks the driver for multiples of this


@dataclass(frozen=True)
class Forecast:
    """One rank's predicted memory: the steady step, its phases, the node's host memory."""

    ledger: Ledger
    host_bytes_per_node: int

    @property
    def device_peak_bytes(self) -> int:
        """The steady step's: no phase holds more, since each holds a part of what the step does."""
        return self.ledger.device_peak_bytes

    @property
    def phases(self) -> Mapping[str, int]:
        """Device bytes at most: at load, in the first step, a steady step, evaluation, a save."""
        return _phases(self.ledger.entries)

    @property
    def reserved_bytes(self) -> int:
        """What the caching allocator holds for the peak at least: every tensor in whole segments of 2 MiB."""
        alive = (e for e in self.ledger.entries if e.place == "device" and self.ledger.moment in e.during)
        return sum(-(-entry.num_bytes // SEGMENT_BYTES) * SEGMENT_BYTES for entry in alive)


def forecast(shape: RunShape, policies: Policies = PLAIN, *, without: frozenset[str] = frozenset()) -> Forecast:
    """Predict one rank of `shape` under `policies` (a flattener that isn't named is off).

    `without` names tensors that the program at hand doesn't have: a fused AdamW has no "foreach transient".
    """
    ledger = Ledger.from_entries(e for e in program_entries(shape, policies) if e.tensor not in without)
    return Forecast(ledger, ledger.host_bytes * min(shape.mesh.ranks_per_node, shape.mesh.world))


def predict(shape: RunShape, policies: Policies = PLAIN) -> Ledger:
    """The steady step's ledger of one rank: every entry names a tensor, no constant is fitted.

    Peak: over the moments of a step, the sum of the entries alive at that moment.
    """
    return forecast(shape, policies).ledger


def program_entries(shape: RunShape, policies: Policies = PLAIN) -> Iterator[Entry]:
    """Every entry of the program's ledger, those of no bytes left out."""
    replaced = frozenset(itertools.chain.from_iterable(_replaced(name, policies) for name in NAMES))
    held = with_own_head(shape) if HEAD_GATHERED in replaced else shape
    common = [_sharding(held), _block(shape), tuple(router_loss_entries(shape))]
    if HEAD_GATHERED in replaced:
        common.append(tuple(own_head_entries(shape)))
    own = (_of_flattener(name, held, policies.get(name, OFF)) for name in NAMES)
    for entry in itertools.chain(*common, *own):
        if entry.tensor not in replaced:
            yield entry


@lru_cache(maxsize=64)
def _sharding(shape: RunShape) -> tuple[Entry, ...]:
    return tuple(entry for entry in sharding_entries(shape) if entry.num_bytes)


@lru_cache(maxsize=64)
def _block(shape: RunShape) -> tuple[Entry, ...]:
    return tuple(entry for entry in block_entries(shape) if entry.num_bytes)


@lru_cache(maxsize=256)
def _of_flattener(name: str, shape: RunShape, policy: Any) -> tuple[Entry, ...]:
    """One flattener's entries: a search asks for the same ones in many subsets."""
    entries = half(name, "budget").entries(shape, policy)
    return tuple(through_backward(entry) for entry in entries if entry.num_bytes)


def is_plain(policies: Policies) -> bool:
    return all(isinstance(policy, Off) for policy in policies.values())


def _replaced(name: str, policies: Policies) -> frozenset[str]:
    """Tensors of the common terms that this flattener's policy makes needless."""
    return said_by("replaces", name, policies)


def hidden_parts(policies: Policies) -> frozenset[str]:
    """Parts of the step that some flattener runs beside compute."""
    return frozenset(itertools.chain.from_iterable(said_by("hides", name, policies) for name in NAMES))


def recompute_seconds(shape: RunShape, policies: Policies) -> float:
    """Seconds of one micro-batch that flatteners compute again, beyond every block's own recompute."""
    total = 0.0
    for name in NAMES:
        counts = getattr(half(name, "budget"), "recompute_seconds", None)
        if counts is not None and not isinstance(policies.get(name, OFF), Off):
            total += counts(shape, policies[name])
    return total


def said_by(what: str, name: str, policies: Policies) -> frozenset[str]:
    """What a flattener that is on says of its policy, empty where it has nothing to say."""
    policy = policies.get(name, OFF)
    speaks = None if isinstance(policy, Off) else getattr(half(name, "budget"), what, None)
    return frozenset() if speaks is None else frozenset(speaks(policy))


def through_backward(entry: Entry) -> Entry:
    """Complete an entry that only says "backward" by the other points of the backward.

    What is held from the loss on but not to the update is a boundary: still whole in the last block's attention, gone
    at the end. What isn't held at the loss belongs to the MLP at work: the first blocks have it too.
    """
    during = entry.during
    if Moment.BACKWARD not in during or during & (BLOCK_BACKWARD - {Moment.BACKWARD}):
        return entry
    if Moment.UPDATE in during:
        later = BLOCK_BACKWARD
    else:
        later = frozenset({Moment.ATTENTION}) if Moment.LOSS in during else MLP_BACKWARD
    return replace(entry, during=during | later)


def _phases(entries: tuple[Entry, ...]) -> dict[str, int]:
    forward = (Moment.FORWARD, Moment.LOSS)
    return {
        "load": _peak(entries, (Moment.LOAD,)),
        "first step": _peak(tuple(map(_before_first_update, entries)), STEP),
        "steady step": _peak(entries, STEP),
        "evaluation": _peak(tuple(e for e in entries if not _is_for_backward(e)), forward),
        "save": _peak(entries, (Moment.SAVE,)),
    }


def _before_first_update(entry: Entry) -> Entry:
    """Optimizer state is born in the first update: what fills the whole step but isn't there at load."""
    if entry.owner in PEAKS and entry.during >= STEP and Moment.LOAD not in entry.during:
        return replace(entry, during=frozenset({Moment.UPDATE}))
    return entry


def _is_for_backward(entry: Entry) -> bool:
    return {Moment.FORWARD, Moment.LOSS, Moment.BACKWARD} <= entry.during and Moment.UPDATE not in entry.during


def _peak(entries: tuple[Entry, ...], moments: Any) -> int:
    return Ledger.from_entries(entries, moments=moments).device_peak_bytes


def subsets(policies: Policies) -> Iterator[Policies]:
    """All 16 subsets of the four flatteners, each either off or under the given policy."""
    for choice in itertools.product((False, True), repeat=len(NAMES)):
        yield {name: policies[name] if on else OFF for name, on in zip(NAMES, choice, strict=True)}


def top_holder(ledger: Ledger) -> str:
    """Which of the owners held most at the peak, one of the four peaks first among equals."""
    return max(ledger.holders, key=lambda owner: (ledger.holders[owner], owner in PEAKS), default="weights")
