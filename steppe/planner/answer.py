"""The answer to "what stops my run, at which context, and what do I switch on": plain beside flattened."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from steppe.core.errors import ConfigError
from steppe.core.ledger import PEAKS
from steppe.core.policy import OFF
from steppe.core.shapes import RunShape
from steppe.core.units import format_bytes, format_tokens
from steppe.flatteners import NAMES, half
from steppe.planner import block
from steppe.planner.advice import predicted_without, switch_on
from steppe.planner.context import Context, in_words, max_context, max_context_plain, top_peak
from steppe.planner.layouts import Job, check, check_weights_fit, divisors, layouts
from steppe.planner.plan import Plan
from steppe.planner.search import Candidate, Switch, search, search_plain, switches, works
from steppe.planner.steptime import rates_to_hide

MOST_RANKS = 8192


@dataclass(frozen=True)
class Side:
    """One program at the asked length: its chosen layout, and the longest context of any."""

    chosen: Candidate
    context: Context

    @property
    def peaks(self) -> dict[str, int]:
        held = self.chosen.forecast.ledger.peaks
        return {name: held.get(name, 0) for name in PEAKS}

    def to_json(self) -> dict[str, Any]:
        seen, mesh = self.chosen, self.chosen.shape.mesh
        return {
            "fits": seen.fits,
            "device_peak_bytes": seen.forecast.device_peak_bytes,
            "device_missing_bytes": seen.device_missing,
            "reserved_bytes": seen.forecast.reserved_bytes,
            "moment": seen.forecast.ledger.moment,
            "peaks": self.peaks,
            "holders": dict(seen.forecast.ledger.holders),
            "phases": dict(seen.forecast.phases),
            "host_bytes": seen.forecast.ledger.host_bytes,
            "host_bytes_per_node": seen.forecast.host_bytes_per_node,
            "max_context_tokens": self.context.num_tokens,
            "stopped_by": self.context.stopped_by,
            "tokens_per_second_modelled": seen.time.tokens_per_second,
            "step_seconds_modelled": seen.time.seconds,
            "groups": {"sequence": mesh.sequence, "expert": mesh.expert, "vocab": mesh.vocab},
        }


@dataclass(frozen=True)
class Answer:
    """Everything that `steppe plan` says, as values."""

    model: str
    job: Job
    plain: Side
    flattened: Side
    switches: tuple[Switch, ...]
    sentences: tuple[str, ...]
    rates: Mapping[str, float]
    changes: Mapping[str, Any] = field(default_factory=dict)  # keys of the config.json that the run replaces

    @property
    def plan(self) -> Plan:
        chosen = self.flattened.chosen
        return Plan.of(self.model, chosen.shape, chosen.policies, self.changes)

    def to_json(self) -> dict[str, Any]:
        """The stable keys of `--json`."""
        return {
            "model": self.model,
            "ranks": self.job.world,
            "seq_len": self.job.batch.seq_len,
            "plain": self.plain.to_json(),
            "flattened": self.flattened.to_json(),
            "switches": [{"flattener": s.flattener, "on": s.on, "why": s.why} for s in self.switches],
            "sentences": list(self.sentences),
            "rates_to_hide": dict(self.rates),
            "plan": self.plan.to_tables(),
        }


def answer(model: str, job: Job) -> Answer:
    """Search plain and flattened, and say why. Raises: ConfigError for groups that can't be, weights that don't fit."""
    check(job)
    _check_forced(job)
    check_weights_fit(job, job.machine.device_memory_bytes, lambda: _smallest_world(job))
    plain = Side(search_plain(job), max_context_plain(job))
    flattened = Side(search(job), max_context(job))
    chosen = flattened.chosen
    return Answer(
        model, job, plain, flattened, switches(job, chosen),
        tuple(_sentences(job, plain, flattened)), rates_to_hide(chosen.shape, chosen.forecast.ledger),
    )  # fmt: skip


def _check_forced(job: Job) -> None:
    """Refuse to force a flattener on whose peak this model doesn't have. Raises: ConfigError."""
    shape = next(layouts(job))
    for name, on in job.forced:
        if on and not half(name, "budget").entries(shape, OFF):
            raise ConfigError(
                f"--on {name}", got=f"a {shape.model.model_type} model, which has no {name} peak",
                allowed=", ".join(n for n in NAMES if half(n, "budget").entries(shape, OFF)), remedy="leave it out",
            )  # fmt: skip


def _sentences(job: Job, plain: Side, flattened: Side) -> list[str]:
    shape = flattened.chosen.shape
    told = [*_groups(shape), *_padding(job, plain, shape)]
    if block.scores_are_materialised(shape):
        why, kernel = "as was asked for", "a flash-like kernel"
        if job.attention == "auto":
            why = "since this model's attention sinks have no fused backward in eager code"
            kernel = "a kernel that knows sinks"
        told.append(f"attention: scores are materialised, {why}; with --attention fused ({kernel}) they take no memory")
    if shape.model.has_router_loss and shape.model.num_moe_layers:
        how = "builds a one-hot of all layers" if shape.model.has_router_one_hot else "counts experts layer by layer"
        told.append(f"router loss: plain transformers {how} (--transformers says which version; since 5.16 it counts)")
    if not plain.chosen.fits:
        told.append(f"plain: {_shortage(plain.chosen)}")
        told += switch_on(predicted_without(plain.chosen.forecast.ledger))
    if not flattened.chosen.fits:
        told += [f"flattened: {_shortage(flattened.chosen)}", _ceiling(job, flattened), _smallest_world(job)]
    return told


def _groups(shape: RunShape) -> list[str]:
    mesh, model = shape.mesh, shape.model
    told = [
        f"D {mesh.sequence}: batch {shape.batch.batch} x S {shape.batch.seq_len:,} over {mesh.sequence} ranks is "
        f"N {shape.tokens_per_rank:,} tokens a rank; {model.num_heads // mesh.sequence} of {model.num_heads} heads each"
    ]
    if model.num_experts:
        told.append(
            f"E_p {mesh.expert}: {model.num_experts // mesh.expert} of {model.num_experts} experts live on a rank, "
            f"each sharded over {mesh.world // mesh.expert}"
        )
    told.append(f"P {mesh.vocab}: {-(-model.vocab // mesh.vocab):,} of {model.vocab:,} vocabulary rows on a rank")
    return told


def _padding(job: Job, plain: Side, shape: RunShape) -> list[str]:
    """A length that W and the heads could split over more ranks, were it padded."""
    splits, seq_len = [n for n in divisors(job.world) if job.model.num_heads % n == 0], job.batch.seq_len
    here = max(n for n in splits if seq_len % n == 0)
    if job.sequence is not None or here == splits[-1] or (plain.chosen.fits and shape.mesh.sequence < here):
        return []
    padded = -(-seq_len // splits[-1]) * splits[-1]
    return [f"S {seq_len:,} divides over {here} ranks at most; padded to {padded:,} it divides over {splits[-1]}"]


def _shortage(seen: Candidate) -> str:
    """Which peak doesn't fit, by how many bytes, at which moment."""
    ledger, peak = seen.forecast.ledger, top_peak(seen)
    if seen.device_missing:
        return (
            f"the device misses {format_bytes(seen.device_missing)}: {format_bytes(seen.forecast.device_peak_bytes)} "
            f"at {ledger.moment}, most of it {in_words(peak)} ({format_bytes(ledger.holders.get(peak, 0))})"
        )
    most = max(ledger.host_holders, key=lambda owner: ledger.host_holders[owner])
    return f"the host of a node misses {format_bytes(seen.host_missing)}, most of it {most}"


def _ceiling(job: Job, flattened: Side) -> str:
    """When switches don't help: the tokens that a rank holds against what fits."""
    shape, longest = flattened.chosen.shape, flattened.context
    asked = (
        f"batch x seqlen: {job.batch.batch} x {format_tokens(job.batch.seq_len)} over D {shape.mesh.sequence} is "
        f"N {shape.tokens_per_rank:,}"
    )
    if not longest.num_tokens:
        return f"{asked}; no length fits on W {job.world}: {in_words(longest.stopped_by)} is too large at any"
    split = next(layouts(job.with_seq_len(longest.num_tokens), longest_first=True)).mesh.sequence
    most = job.batch.batch * longest.num_tokens // split
    return (
        f"{asked}; the working-set ceiling of this machine is about N {most:,} "
        f"(S {format_tokens(longest.num_tokens)} over D {split}, stopped by {in_words(longest.stopped_by)})"
    )


def _smallest_world(job: Job) -> str:
    """The smallest doubling of W at which some plan fits; what a rank holds falls with W, so by halving."""
    worlds = list(itertools.takewhile(lambda w: w <= MOST_RANKS, (job.world << n for n in itertools.count(1))))
    open_groups = replace(job, expert=None, sequence=None, vocab=None)
    if not worlds or not works(open_groups.with_world(worlds[-1])):
        return f"no W up to {MOST_RANKS} works at this length: shorten it or take devices with more memory"
    place = bisect.bisect_left(worlds[:-1], True, key=lambda world: works(open_groups.with_world(world)))
    return f"the smallest W that works, doubling from {job.world}: {worlds[place]}"
