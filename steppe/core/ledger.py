"""The Ledger: who holds which bytes at the peak. Predicted and measured ledgers are one type.

An `Entry` is one tensor (or a group of equal ones) with an owner, a place and the moments of a step at which it is
alive. A predicted ledger is the fold of its entries; a measured one comes from the Meter. Judging a prediction is a
subtraction of the two.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

PEAKS: Final = ("dispatch", "vocab", "boundary", "optimizer")
OWNERS: Final = (*PEAKS, "weights", "gradients", "gathered", "attention", "router", "communication", "other")


class Moment(enum.StrEnum):
    """The points of a run at which a peak can stand."""

    LOAD = "load"
    FORWARD = "forward"  # inside the last block's forward, all boundaries alive
    LOSS = "loss"  # inside the vocabulary projection and cross-entropy
    BACKWARD = "backward"  # inside the last block's recompute and backward, all boundaries alive
    ATTENTION = "attention"  # inside the last block's attention backward: the experts' buffers are gone
    BACKWARD_END = "backward_end"  # as BACKWARD in one of the first blocks: nearly all gradients, hardly a boundary
    ATTENTION_END = "attention_end"  # as ATTENTION there
    DENSE_END = "dense_end"  # inside the MLP backward of a leading block without experts, where a model has some
    UPDATE = "update"  # inside the optimizer's step
    EVALUATE = "evaluate"
    SAVE = "save"


STEP: Final = frozenset(
    {
        Moment.FORWARD, Moment.LOSS, Moment.UPDATE,
        Moment.BACKWARD, Moment.ATTENTION, Moment.BACKWARD_END, Moment.ATTENTION_END, Moment.DENSE_END,
    }
)  # fmt: skip
MLP_BACKWARD: Final = frozenset({Moment.BACKWARD, Moment.BACKWARD_END})
ATTENTION_BACKWARD: Final = frozenset({Moment.ATTENTION, Moment.ATTENTION_END})
BLOCK_BACKWARD: Final = MLP_BACKWARD | ATTENTION_BACKWARD | {Moment.DENSE_END}
FIRST_BLOCKS: Final = frozenset({Moment.BACKWARD_END, Moment.ATTENTION_END, Moment.DENSE_END})
ALWAYS: Final = frozenset(Moment)

# Tensors of every program that a flattener may make needless: its budget names them in `replaces(policy)`.
HEAD_GATHERED: Final = "head, gathered"
HEAD_GRADIENT: Final = "head's gradient, unsharded"
ROUTER_GRADIENT: Final = "gradient through the router"
EXPERTS_EARLY: Final = "next block's experts, gathered early"
EXPERTS_REDUCED: Final = "last block's expert gradients, being reduced"
GRADIENT_SHARDS: Final = "gradients of the shards"
EARLY_GRADIENTS: Final = "gradients of the shards so far"
ROUTER_LOSS: Final = (
    "router logits of all blocks", "their softmax", "one-hot of the chosen experts", "its float32 copy",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of the ledger: `num_bytes` in all, held by `owner`, alive `during` these moments."""

    owner: str
    tensor: str
    num_bytes: int
    during: frozenset[Moment] = STEP
    place: str = "device"

    def __post_init__(self) -> None:
        assert self.owner in OWNERS, self.owner
        assert self.place in ("device", "host"), self.place
        assert self.num_bytes >= 0, (self.tensor, self.num_bytes)


@dataclass(frozen=True)
class Ledger:
    """Bytes by owner. `device_peak_bytes` is the highest total; `holders` says who held it at that moment; `peaks` is
    the most each owner ever held; `host_bytes` the most the host held; `moment` where the device peak stands."""

    device_peak_bytes: int
    holders: Mapping[str, int]
    peaks: Mapping[str, int]
    host_bytes: int = 0
    host_holders: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    moment: str = ""
    entries: tuple[Entry, ...] = ()

    @classmethod
    def from_entries(cls, entries: Iterable[Entry], *, moments: Iterable[Moment] = STEP) -> Ledger:
        """Fold entries into a ledger over `moments`; the peak is the moment with the largest device total."""
        kept = tuple(entries)
        device, host = _by_owner(kept, sorted(moments))
        top = max(device, key=lambda m: sum(device[m].values()))
        host_top = max(host, key=lambda m: sum(host[m].values()))
        peaks = dict.fromkeys(OWNERS, 0)
        for held in device.values():
            peaks.update((owner, size) for owner, size in held.items() if size > peaks[owner])
        return cls(
            device_peak_bytes=sum(device[top].values()),
            holders=device[top],
            peaks={owner: size for owner, size in peaks.items() if size or owner in PEAKS},
            host_bytes=sum(host[host_top].values()),
            host_holders=host[host_top],
            moment=str(top),
            entries=kept,
        )

    def __sub__(self, other: Ledger) -> LedgerDiff:
        owners = {*self.peaks, *other.peaks}
        return LedgerDiff(
            device_peak_bytes=self.device_peak_bytes - other.device_peak_bytes,
            peaks={owner: self.peaks.get(owner, 0) - other.peaks.get(owner, 0) for owner in sorted(owners)},
            host_bytes=self.host_bytes - other.host_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary with stable keys."""
        plain = asdict(self)
        plain["entries"] = [{**asdict(e), "during": sorted(e.during)} for e in self.entries]
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        entries = tuple(
            Entry(**{**e, "during": frozenset(Moment(m) for m in e["during"])}) for e in data.get("entries", ())
        )
        return cls(**{**data, "entries": entries})


@dataclass(frozen=True)
class LedgerDiff:
    """One ledger minus another, owner by owner (signed bytes)."""

    device_peak_bytes: int
    peaks: Mapping[str, int]
    host_bytes: int


_Held = dict[Moment, dict[str, int]]


def _by_owner(entries: tuple[Entry, ...], moments: Iterable[Moment]) -> tuple[_Held, _Held]:
    """At each moment the bytes of every owner that holds any there, on the device and on the host."""
    device: _Held = {moment: {} for moment in moments}
    host: _Held = {moment: {} for moment in device}
    for entry in entries:
        place, owner, num_bytes = (device if entry.place == "device" else host), entry.owner, entry.num_bytes
        for moment in entry.during if num_bytes else ():
            if (held := place.get(moment)) is not None:
                held[owner] = held.get(owner, 0) + num_bytes
    return device, host
