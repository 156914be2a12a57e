"""The working set of a run, fixed at launch: refused before step 1 when it can't fit, and held to while it runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from steppe.core.errors import WorkingSetError
from steppe.core.ledger import PEAKS, Ledger, Moment
from steppe.core.policy import Off
from steppe.core.shapes import MachineShape, RunShape
from steppe.core.units import format_bytes, format_tokens
from steppe.flatteners import DECISION_ORDER
from steppe.planner.context import top_peak
from steppe.planner.plan import Plan
from steppe.planner.predict import Policies
from steppe.planner.search import Candidate, candidate, policies_of, verdicts

DEVIATION: Final = 0.05  # of a peak, beyond which predicted and measured are said to differ
COMPARED_STEPS: Final = (1, 3)  # the first, and one in which everything lazy exists


@dataclass(frozen=True)
class WorkingSet:
    """A run shape and its policies: what every rank may hold, from launch to the last step."""

    shape: RunShape
    policies: Policies

    @classmethod
    def of(cls, plan: Plan, shape: RunShape, machine: MachineShape) -> WorkingSet:
        """The working set of a plan on a machine; `shape` gives the model."""
        whole = replace(shape, batch=plan.batch, mesh=plan.mesh, dtypes=plan.dtypes, machine=machine)
        return cls(whole, plan.policies)

    @property
    def tokens_per_rank(self) -> int:
        """N, the most tokens that one rank may bring to a micro-batch."""
        return self.shape.tokens_per_rank

    def launch(self) -> Candidate:
        """Predict, and refuse before the first step what can't fit.

        Raises: WorkingSetError with the peak, the bytes that are missing, and the cheapest change that fits.
        """
        seen = candidate(self.shape, self.policies)
        if not seen.fits:
            raise _refusal(seen)
        return seen

    def admit(self, num_tokens: int) -> None:
        """Refuse a micro-batch larger than was declared. Raises: WorkingSetError."""
        self._admit(num_tokens, self.tokens_per_rank, "tokens of a rank in one micro-batch")

    def _admit(self, num_tokens: int, allowed: int, what: str) -> None:
        if num_tokens > allowed:
            raise WorkingSetError(
                what, got=f"{num_tokens:,}", allowed=f"at most {allowed:,}, the declared maximum",
                remedy="declare a longer seq_len at launch, or pack and cut documents to the declared length",
            )  # fmt: skip

    def check(self, loader: Iterable[Any], batches: int = 100) -> int:
        """Look at the first batches before launch; whole sequences are expected, as a loader yields them before they
        are split over D ranks. Returns the most tokens seen in one batch.

        Raises: WorkingSetError for a batch that holds more than batch x S tokens, or one that tells no tokens.
        """
        allowed, most = self.tokens_per_rank * self.shape.mesh.sequence, 0
        for index, batch in enumerate(itertools.islice(loader, batches)):
            tokens = count_tokens(batch)
            self._admit(tokens, allowed, f"tokens of batch {index} (its documents together)")
            most = max(most, tokens)
        return most

    def deviations(self, measured: Ledger, step: int) -> Iterator[str]:
        """Where a measured step differs from the prediction by more than 5%, in words; steps 1 and 3 are compared.

        Peaks below 1% of the device's peak are left out: there 5% is less than the allocator's own grain. Buffers that
        lie there from launch on count in the device peak only: whoever measures one step doesn't know whose they are.
        """
        if step not in COMPARED_STEPS:
            return
        predicted = candidate(self.shape, self.policies).forecast
        first = step == COMPARED_STEPS[0]
        told = predicted.phases["first step"] if first else predicted.device_peak_bytes
        yield from _differs("device peak", told, measured.device_peak_bytes, 0)
        own = Ledger.from_entries(e for e in predicted.ledger.entries if Moment.LOAD not in e.during)
        for name in PEAKS if not first else ():
            pair = own.peaks.get(name, 0), measured.peaks.get(name, 0)
            yield from _differs(f"{name} peak", *pair, told // 100)


def _differs(what: str, predicted: int, measured: int, negligible: int) -> Iterator[str]:
    if max(predicted, measured) > negligible and abs(measured - predicted) > DEVIATION * max(predicted, 1):
        share = (measured - predicted) / max(predicted, 1)
        yield f"{what}: measured {format_bytes(measured)}, predicted {format_bytes(predicted)} ({share:+.0%})"


def count_tokens(batch: Any) -> int:
    """Tokens in a batch: of its `input_ids` (or the batch itself), a tensor, an array or lists of them or of numbers.

    Raises: WorkingSetError when there is nothing to count.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        if ids is batch:
            _refuse_pairs(ids)
        return sum(1 if isinstance(item, int) else count_tokens(item) for item in ids)
    shape = getattr(ids, "shape", None)
    if shape is None:
        raise WorkingSetError(
            "batch", got=type(batch).__name__, allowed="input_ids as a tensor, an array or lists",
            remedy="give the loader that the run will use",
        )  # fmt: skip
    return math.prod(int(length) for length in shape)


def _refuse_pairs(ids: Sequence[Any]) -> None:
    """Raises: WorkingSetError for (inputs, labels) and the like: which of several whole tensors are the tokens?"""
    if len(ids) > 1 and all(len(getattr(item, "shape", ())) > 1 for item in ids):
        raise WorkingSetError(
            "batch", got=f"{len(ids)} tensors without names", allowed="input_ids as a tensor, an array or lists",
            remedy='let the loader yield {"input_ids": ...}',
        )  # fmt: skip


def _refusal(seen: Candidate) -> WorkingSetError:
    ledger, peak = seen.forecast.ledger, top_peak(seen)
    remedy = cheapest_remedy(seen)
    if seen.device_missing:
        return WorkingSetError(
            f"device memory, {peak} peak at {ledger.moment}",
            got=f"{format_bytes(seen.forecast.device_peak_bytes)}, {format_bytes(seen.device_missing)} too many "
            f"({peak} {format_bytes(ledger.holders.get(peak, 0))})",
            allowed=format_bytes(seen.shape.machine.device_memory_bytes), remedy=remedy,
        )  # fmt: skip
    most = max(ledger.host_holders, key=lambda owner: ledger.host_holders[owner])
    return WorkingSetError(
        f"host memory of a node, {most}",
        got=f"{format_bytes(seen.forecast.host_bytes_per_node)}, {format_bytes(seen.host_missing)} too many",
        allowed=format_bytes(seen.shape.machine.host_memory_bytes), remedy=remedy,
    )  # fmt: skip


def cheapest_remedy(seen: Candidate) -> str:
    """The change that makes the run fit and costs the least step time: one switch, else several, else fewer tokens."""
    for tried in (_one_switch(seen), _all_switches(seen)):
        if tried is not None:
            return tried
    return _fewer_tokens(seen)


def _off(seen: Candidate) -> list[str]:
    may = verdicts(seen.shape, pressed=True)
    return [name for name in DECISION_ORDER if isinstance(seen.policies.get(name), Off) and may[name].on]


def _one_switch(seen: Candidate) -> str | None:
    offers = [
        (name, candidate(seen.shape, {**seen.policies, name: policy}))
        for name in _off(seen)
        for policy in policies_of(name)
    ]
    fitting = [(offer.time.seconds, name) for name, offer in offers if offer.fits]
    return f"switch on {min(fitting)[1]}" if fitting else None


def _all_switches(seen: Candidate) -> str | None:
    names = _off(seen)
    everything = {**seen.policies, **{name: policies_of(name)[-1] for name in names}}
    if names and candidate(seen.shape, everything).fits:
        return f"switch on {' and '.join(names)}"
    return None


def _fewer_tokens(seen: Candidate) -> str:
    """The longest half, quarter, ... of S that fits on this layout with every switch on; else more ranks."""
    everything = {**seen.policies, **{name: policies_of(name)[-1] for name in _off(seen)}}
    batch = seen.shape.batch
    tokens = batch.seq_len // 2
    while tokens >= 1024 and tokens % seen.shape.mesh.sequence == 0:
        shorter = replace(seen.shape, batch=replace(batch, seq_len=tokens))
        if candidate(shorter, everything).fits:
            on = "".join(f", with {name} on" for name in _off(seen))
            return f"shorten seq_len to {format_tokens(tokens)}{on}, or take more ranks"
        tokens //= 2
    return "take more ranks: no shorter sequence fits on these"
