"""From a request to a call: refuse, agree with the other ranks, choose schedule and tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from steppe.core.errors import ConfigError, Refusal
from steppe.core.units import MiB
from steppe.flatteners.vocab.agree import Agreement, agree, check_labels
from steppe.flatteners.vocab.batch import Call
from steppe.flatteners.vocab.budget import (
    ACCELERATOR_BUDGET_BYTES,
    ACCELERATOR_SCRATCH_BYTES,
    CPU_SCRATCH_BYTES,
    VocabPolicy,
)
from steppe.flatteners.vocab.checks import check_options, check_tensors
from steppe.flatteners.vocab.functions import Inputs
from steppe.flatteners.vocab.objective import Objective
from steppe.flatteners.vocab.products import accumulator_dtype, operand_dtype
from steppe.flatteners.vocab.schedule import ACCELERATOR_RATES, CPU_RATES, Head, Rates, choose, counted_rows
from steppe.flatteners.vocab.stats import RingStats
from steppe.flatteners.vocab.travel import Wire
from steppe.runtime.collectives import Group

Tensor = torch.Tensor
LARGEST_INDEX = 2**24  # the column of the maximum is kept as a float32 among the other statistics


@dataclass(frozen=True)
class Request:
    """The options of one call, as the caller gave them."""

    reduction: str
    ignore_index: int
    num_items_in_batch: float | Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    vocab_size: int | None
    want: tuple[str, ...]
    policy: VocabPolicy

    def check(self) -> None:
        check_options(
            reduction=self.reduction, label_smoothing=self.label_smoothing, z_loss=self.z_loss, softcap=self.softcap,
            vocab_size=self.vocab_size, want=self.want, num_items_in_batch=self.num_items_in_batch,
        )  # fmt: skip

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return (
            self.reduction, self.ignore_index, self.num_items_in_batch is None, self.label_smoothing, self.z_loss,
            self.softcap, self.logit_scale, self.vocab_size, sorted(self.want), self.policy,
        )  # fmt: skip

    @property
    def scalar(self) -> bool:
        """Whether only a reduced loss can be differentiated."""
        return self.reduction != "none" and set(self.want) <= {"loss", "num_correct"}

    def objective(self, vocab: int, *, weighted: bool) -> Objective:
        return Objective(
            vocab, self.label_smoothing, self.z_loss, self.softcap, self.logit_scale, weighted, frozenset(self.want)
        )


@dataclass(frozen=True)
class Given:
    """The tensors of one call, as the caller gave them; anything may be wrong with them."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    class_weight: Tensor | None

    def check(self) -> None:
        check_tensors(
            self.hidden, self.weight, self.labels, {"bias": self.bias, "class_weight": self.class_weight}
        )  # fmt: skip

    def needs_grad(self) -> tuple[bool, ...]:
        """For hidden, weight and bias."""
        if not torch.is_grad_enabled():
            return False, False, False
        return tuple(getattr(t, "requires_grad", False) for t in (self.hidden, self.weight, self.bias))

    def fingerprint(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        kinds = tuple(getattr(t, "dtype", None) for t in (self.hidden, self.weight))
        return (*kinds, self.hidden.shape[-1], self.bias is None, self.class_weight is None)

    @property
    def device(self) -> torch.device:
        tensors = (t for t in (self.weight, self.hidden, self.labels) if isinstance(t, Tensor))
        return next((t.device for t in tensors), torch.device("cpu"))


def prepare(request: Request, given: Given, group: Group, stats: RingStats) -> tuple[Call, Inputs]:
    """Raises: what this rank or any other refuses, before the first block is sent."""
    refusal = _refusal(request, given)
    if refusal is None:
        labels = given.labels.reshape(-1).long()
    else:
        labels = torch.zeros(0, dtype=torch.int64, device=given.device)
    valid = labels != request.ignore_index
    budget_bytes, scratch_bytes, rates = device_defaults(labels.device.type)
    agreed = agree(
        labels, valid, shard_rows=given.weight.shape[0] if refusal is None else 0,
        budget_bytes=request.policy.budget_bytes or budget_bytes, refusal=refusal, group=group,
        must_match={
            "options": request.fingerprint,
            "dtypes, width, bias and class_weight": given.fingerprint() if refusal is None else None,
            "requires_grad of hidden, weight and bias": given.needs_grad(),
        },
    )  # fmt: skip
    head = _head(request, given, agreed)
    check_labels(agreed, head.vocab, request.ignore_index)
    if "num_correct" in request.want and head.vocab > LARGEST_INDEX:
        raise ConfigError(
            "num_correct", got=f"V {head.vocab:,}", allowed=f"V up to {LARGEST_INDEX:,}, the integers of float32",
            remedy="leave num_correct out",
        )  # fmt: skip
    limits = request.policy.limits(agreed.budget_bytes, scratch_bytes)
    schedule, sizes = choose(request.policy.schedule, head, limits, rates)
    objective = request.objective(head.vocab, weighted=given.class_weight is not None)
    call = Call(Wire(group, stats), head, schedule, sizes, objective, stats)
    _note(call, labels.numel())
    index = valid.nonzero()[:, 0] if head.rows[call.wire.me] < labels.numel() else None
    hidden = given.hidden.reshape(-1, head.hidden)
    return call, Inputs(hidden, given.weight, given.bias, given.class_weight, labels, index)


def _refusal(request: Request, given: Given) -> Refusal | None:
    try:
        request.check()
        given.check()
    except Refusal as raised:
        return raised
    return None


def _head(request: Request, given: Given, agreed: Agreement) -> Head:
    needs = given.needs_grad()
    objective = request.objective(1, weighted=given.class_weight is not None)
    return Head(
        rows=agreed.counted, shards=real_shards(agreed.shards, request.vocab_size), hidden=given.hidden.shape[-1],
        hidden_bytes=given.hidden.element_size(), weight_bytes=given.weight.element_size(),
        state_bytes=accumulator_dtype(given.hidden).itemsize, num_fields=len(objective.fields),
        num_vectors=sum(t is not None for t in (given.bias, given.class_weight)),
        hidden_grad=needs[0], weight_grad=needs[1], bias_grad=needs[2], scalar=request.scalar,
        operand_bytes=operand_dtype(given.hidden).itemsize,
    )  # fmt: skip


def real_shards(shards: tuple[int, ...], vocab_size: int | None) -> tuple[int, ...]:
    """Rows of every shard that are not padding.

    Raises: ConfigError where there are fewer rows than `vocab_size`, or none at all.
    """
    vocab = sum(shards) if vocab_size is None else vocab_size
    if not 0 < vocab <= sum(shards):
        raise ConfigError(
            "vocab_size", got=vocab, allowed=f"1 to the {sum(shards)} rows of all shards",
            remedy="leave it out, or give the tokenizer's size",
        )  # fmt: skip
    starts = [sum(shards[:rank]) for rank in range(len(shards))]
    return tuple(max(0, min(rows, vocab - start)) for rows, start in zip(shards, starts, strict=True))


def _note(call: Call, num_labels: int) -> None:
    """Count the call itself."""
    stats, head, me = call.stats, call.head, call.wire.me
    stats.calls += 1
    stats.schedule = call.schedule
    stats.tile_tokens, stats.tile_vocab = call.tiles.tile_tokens, call.tiles.tile_vocab
    stats.rows += head.rows[me]
    stats.ignored_rows += num_labels - head.rows[me]
    stats.pass_size += counted_rows(head, me, call.schedule) * head.hidden


@functools.cache
def device_defaults(kind: str) -> tuple[int, int, Rates]:
    """Bytes of a strip, bytes of scratch, and rates; on the CPU from its last-level cache, 32 MiB where unknown."""
    if kind != "cpu":
        return ACCELERATOR_BUDGET_BYTES, ACCELERATOR_SCRATCH_BYTES, ACCELERATOR_RATES
    told = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    kib = told.read_text().strip().removesuffix("K") if told.exists() else ""
    cache_bytes = int(kib) * 1024 if kib.isdigit() else 32 * MiB
    return max(16 * MiB, min(64 * MiB, cache_bytes)), CPU_SCRATCH_BYTES, CPU_RATES
