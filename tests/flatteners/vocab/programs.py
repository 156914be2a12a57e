"""Ours, plain and truth on the same inputs, on any number of ranks; judged by the reordered grade."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.reference import plain_loss
from steppe.flatteners.vocab.ring import ring_dtp
from steppe.flatteners.vocab.schedule import Head, passes, wire
from steppe.flatteners.vocab.stats import RingStats
from steppe.runtime import collectives
from tests.flatteners.vocab.extended import closed_forms
from tests.support.exactness import assert_reordered
from tests.support.ranks import run_ranks

ROW_VALUES = ("logprob", "entropy", "lse")


@dataclass(frozen=True)
class Spec:
    """One call: tokens and vocabulary rows of every rank, and its options; tensors follow from the seed."""

    rows: tuple[int, ...] = (37,)
    shards: tuple[int, ...] = (101,)
    width: int = 16
    dtype: str = "float32"
    schedule: str = "auto"
    ignored: float = 0.2
    bias: bool = False
    class_weight: bool = False
    offset: float = 0.0  # common to all logits
    masked: int = 0  # the first so many entries of the vocabulary have the bias `mask` and no labels
    mask: float = float("-inf")
    frozen: str = ""  # "hidden", "weight" (with its bias) or "weight alone"
    want: tuple[str, ...] = ("loss",)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: {"tile_tokens": 5, "tile_vocab": 7})
    seed: int = 0

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)


@dataclass
class Tensors:
    """The tensors of all ranks, one after the other."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    upstream: dict[str, Tensor]

    def to(self, dtype: torch.dtype) -> Tensors:
        cast = [None if t is None else t.to(dtype) for t in (self.hidden, self.weight, self.bias, self.class_weight)]
        return Tensors(cast[0], cast[1], self.labels, cast[2], cast[3], self.upstream)


def make(spec: Spec) -> Tensors:
    """Random tensors that are a function of the spec alone; in its dtype."""
    g = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)
    num, vocab = sum(spec.rows), sum(spec.shards)
    hidden = torch.randn(num, spec.width, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, spec.width, generator=g, dtype=torch.float64)
    labels = torch.randint(0, spec.options.get("vocab_size") or vocab, (num,), generator=g)
    ignore_index = spec.options.get("ignore_index", -100)
    labels[torch.rand(num, generator=g) < spec.ignored] = ignore_index
    bias = torch.randn(vocab, generator=g, dtype=torch.float64)
    if spec.offset:  # on a grid where logits are exact in float32, so that only the softmax is judged
        hidden, weight, bias = ((t * 8).round() / 8 for t in (hidden, weight, bias))
        bias += spec.offset
    if spec.masked:
        bias[: spec.masked] = spec.mask
        labels[(labels >= 0) & (labels < spec.masked)] = spec.masked
    bias = bias.to(dtype) if spec.bias else None
    weights = torch.rand(vocab, generator=g, dtype=torch.float64).to(dtype) if spec.class_weight else None
    upstream = {name: torch.randn(num, generator=g, dtype=torch.float64) for name in ("loss", *ROW_VALUES)}
    return Tensors(hidden.to(dtype), weight.to(dtype), labels, bias, weights, upstream)


def _total(values: dict[str, Tensor], spec: Spec, upstream: dict[str, Tensor]) -> Tensor:
    """What is differentiated: the reduced loss times a factor, or every row value by an upstream of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for name in (n for n in spec.want if n != "num_correct"):
        value = values[name]
        factor = upstream[name].to(value.dtype)
        total = total + (value * (factor if value.dim() else 0.75)).sum().double()
    return total


def _grads(total: Tensor, leaves: list[Tensor | None]) -> list[Tensor | None]:
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True) if wanted else ())
    return [next(found) if t is not None and t.requires_grad else None for t in leaves]


def _leaf(tensor: Tensor | None, frozen: bool) -> Tensor | None:
    return None if tensor is None else tensor.clone().requires_grad_(not frozen)


def plain(spec: Spec, tensors: Tensors) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """Values and gradients of the whole program in one process."""
    leaves = [
        _leaf(tensors.hidden, spec.frozen == "hidden"),
        _leaf(tensors.weight, spec.frozen.startswith("weight")),
        _leaf(tensors.bias, spec.frozen == "weight"),
    ]
    values = plain_loss(
        leaves[0], leaves[1], tensors.labels, bias=leaves[2], class_weight=tensors.class_weight, **spec.options
    )
    return values, _grads(_total(values, spec, tensors.upstream), leaves)


def spans(lengths: tuple[int, ...]) -> list[slice]:
    return [slice(sum(lengths[:r]), sum(lengths[: r + 1])) for r in range(len(lengths))]


def ours(
    spec: Spec, tensors: Tensors, rank: int, group: Any, stats: RingStats | None = None
) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """This rank's values and gradients."""
    rows, shard = spans(spec.rows)[rank], spans(spec.shards)[rank]
    pick = lambda t: None if t is None else t[shard]  # noqa: E731
    leaves = [
        _leaf(tensors.hidden[rows], spec.frozen == "hidden"),
        _leaf(tensors.weight[shard], spec.frozen.startswith("weight")),
        _leaf(pick(tensors.bias), spec.frozen == "weight"),
    ]
    output = ring_dtp(
        leaves[0], leaves[1], tensors.labels[rows], group=group, bias=leaves[2],
        class_weight=pick(tensors.class_weight), want=spec.want,
        policy=VocabPolicy(schedule=spec.schedule, **spec.sizes), stats=stats, **spec.options,
    )  # fmt: skip
    values = {name: value for name, value in output._asdict().items() if value is not None}
    upstream = {name: vector[rows] for name, vector in tensors.upstream.items()}
    return values, _grads(_total(values, spec, upstream), leaves)


def head_of(spec: Spec, tensors: Tensors) -> Head:
    """The integers of the call, counted here and not by the code that is judged."""
    valid = tensors.labels != spec.options.get("ignore_index", -100)
    vocab, starts = spec.options.get("vocab_size") or sum(spec.shards), [s.start for s in spans(spec.shards)]
    num_fields = 3 + 2 * bool(spec.options.get("label_smoothing")) + spec.class_weight
    return Head(
        rows=tuple(int(valid[span].sum()) for span in spans(spec.rows)),
        shards=tuple(max(0, min(n, vocab - start)) for n, start in zip(spec.shards, starts, strict=True)),
        hidden=spec.width, hidden_bytes=tensors.hidden.element_size(), weight_bytes=tensors.weight.element_size(),
        state_bytes=max(4, tensors.hidden.element_size()), operand_bytes=max(4, tensors.hidden.element_size()),
        num_fields=num_fields + ("entropy" in spec.want) + ("num_correct" in spec.want),
        num_vectors=spec.bias + spec.class_weight,
        hidden_grad=spec.frozen != "hidden", weight_grad=not spec.frozen.startswith("weight"),
        bias_grad=spec.bias and spec.frozen != "weight",
    )  # fmt: skip


def check_laws(spec: Spec, tensors: Tensors, rank: int, stats: RingStats) -> None:
    """Counted matrix passes and counted bytes are the schedule's law."""
    head = head_of(spec, tensors)
    law = wire(stats.schedule, head, rank)
    assert stats.payload_bytes == law.forward + law.backward, f"{spec} rank {rank}: {stats} {law}"
    assert stats.side_bytes == law.side, f"{spec} rank {rank}: {stats} {law}"
    if stats.pass_size:
        assert stats.passes == passes(stats.schedule, head), f"{spec} rank {rank}"


def extended(spec: Spec, tensors: Tensors) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """`plain` in extended precision, by closed forms, rounded to float64: the truth of float64."""
    found, grads = closed_forms(tensors, spec.want, **spec.options)
    bare = spec.frozen == "hidden", spec.frozen.startswith("weight"), spec.frozen == "weight"
    given = tensors.hidden, tensors.weight, tensors.bias
    return found, [None if t is None or b else g for t, b, g in zip(given, bare, grads, strict=True)]


@dataclass(frozen=True)
class Known:
    """What is the same under every schedule and tile size: the plain program's results and the truth."""

    tensors: Tensors
    plain: tuple[dict[str, Tensor], list[Tensor | None]]
    truth: tuple[dict[str, Tensor], list[Tensor | None]]

    @classmethod
    def of(cls, spec: Spec) -> Known:
        tensors = make(spec)
        # float64 judged by float64 would give the plain program no error at all.
        truth = extended(spec, tensors) if spec.dtype == "float64" else plain(spec, tensors.to(torch.float64))
        return cls(tensors, plain(spec, tensors), truth)


@dataclass(frozen=True)
class Outcome:
    """What one rank found, in float64 arrays, which hold every dtype of ours and cross a pipe cheaply."""

    values: dict[str, Any]
    grads: list[Any]
    dtypes: tuple[torch.dtype, ...]
    stats: RingStats


def outcome(spec: Spec, tensors: Tensors, rank: int, group: Any) -> Outcome:
    """One call with all its gradients; its counters are held against the laws."""
    stats = RingStats()
    values, grads = ours(spec, tensors, rank, group, stats)
    check_laws(spec, tensors, rank, stats)
    held = [None if t is None else t.detach().double().numpy() for t in (*values.values(), *grads)]
    dtypes = tuple(t.dtype for t in (*values.values(), *grads) if t is not None)
    return Outcome(dict(zip(values, held, strict=False)), held[len(values) :], dtypes, stats)


def outcomes(rank: int, world_size: int, specs: list[Spec]) -> list[Outcome]:
    """Runs on each rank; tensors are made once for specs that follow one another and differ in schedule and sizes."""
    found, group, before, tensors = [], collectives.world() if world_size > 1 else None, "", None
    for spec in specs:
        if (key := repr(spec.but(schedule="", sizes={}))) != before:
            before, tensors = key, make(spec)
        assert tensors is not None
        found.append(outcome(spec, tensors, rank, group))
    return found


def judge(spec: Spec, case: Known, ranks: list[Outcome]) -> None:
    """Values and gradients of all ranks, put together, against plain and truth."""
    (eager, eager_grads), (truth, true_grads) = case.plain, case.truth
    assert len({found.dtypes for found in ranks}) == 1, spec
    assert all(found.values.keys() == set(spec.want) for found in ranks), spec  # nothing that was not asked for
    dtypes = iter(ranks[0].dtypes)
    length = max(spec.width, sum(spec.rows), sum(spec.shards))
    for name in ranks[0].values:
        dtype = next(dtypes)
        parts = [torch.as_tensor(found.values[name]) for found in ranks]
        value = (torch.cat(parts) if parts[0].dim() else torch.stack(parts).sum()).to(dtype)
        if name == "num_correct":
            assert value == eager[name], spec
            continue
        assert dtype == torch.promote_types(case.tensors.hidden.dtype, torch.float32), spec
        assert_reordered(value, eager[name], truth[name], length=length, what=f"{name} of {spec}")
    for place, name in enumerate(("hidden", "weight", "bias")):
        grads, expected = [found.grads[place] for found in ranks], true_grads[place]
        assert [grad is None for grad in grads] == [expected is None] * len(ranks), f"gradient of {name} in {spec}"
        if expected is not None:
            whole = torch.cat([torch.as_tensor(grad) for grad in grads]).to(next(dtypes))
            near = eager_grads[place]
            assert near is not None
            assert_reordered(whole, near, expected, length=length, what=f"gradient of {name} in {spec}")


def check_parity(spec: Spec) -> None:
    """One process."""
    case = Known.of(spec)
    judge(spec, case, [outcome(spec, case.tensors, 0, None)])


def check_on_ranks(specs: list[Spec], ranks: int, timeout_s: float = 60.0) -> None:
    """All specs in one launch."""
    by_rank = run_ranks(outcomes, ranks, specs, timeout_s=timeout_s)
    before, case = "", None
    for spec, found in zip(specs, zip(*by_rank, strict=True), strict=True):
        if (key := repr(spec.but(schedule="", sizes={}))) != before:
            before, case = key, Known.of(spec)
        assert case is not None
        judge(spec, case, list(found))
