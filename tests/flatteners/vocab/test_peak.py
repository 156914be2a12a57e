"""Memory by the allocator's own events: two-sided against the budget, flat in N and V, no tensor of N x V/P."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from steppe.core.units import MiB
from steppe.flatteners.vocab.budget import CPU_SCRATCH_BYTES, VocabPolicy, transient
from steppe.flatteners.vocab.ring import ring_dtp
from steppe.flatteners.vocab.schedule import Head, tiles
from steppe.runtime import collectives
from tests.flatteners.vocab.programs import Spec, Tensors, head_of, make, spans
from tests.support.peaks import assert_peak, measured_peak
from tests.support.ranks import run_ranks

WIDTH = 16
# Row vectors of one strip (columns, hits, states, slopes, and what merging makes) and of the reduction.
ROW_SLACK_BYTES = 400
WHY = "vectors of a strip's rows, and of the reduction's"


def program(spec: Spec, tensors: Tensors, rank: int, group: object):
    rows, shard = spans(spec.rows)[rank], spans(spec.shards)[rank]
    hidden, weight = (
        t.clone().requires_grad_() for t in (tensors.hidden[rows], tensors.weight[shard])
    )  # fmt: skip
    labels = tensors.labels[rows].clone()

    def step() -> tuple[torch.Tensor, ...]:
        output = ring_dtp(
            hidden, weight, labels, group=group, want=spec.want, policy=VocabPolicy(spec.schedule, **spec.sizes),
            **spec.options,
        )  # fmt: skip
        total = sum(value.sum() for value in output if value is not None)
        return torch.autograd.grad(total, (hidden, weight))

    return step


def formula(spec: Spec, head: Head, rank: int) -> tuple[int, int]:
    """Bytes of the transient, and of the gradients. A gradient with an accumulator is made of it after the peak."""
    limits = VocabPolicy(spec.schedule, **spec.sizes).limits(0, CPU_SCRATCH_BYTES)
    sized = tiles(spec.schedule, head, limits)
    held = transient(spec.schedule, head, sized, entropy="entropy" in spec.want, ignoring=spec.ignored > 0)
    hidden, weight = held.accumulators.values()
    hidden = hidden or spec.rows[rank] * WIDTH * head.hidden_bytes
    weight = weight or spec.shards[rank] * WIDTH * head.weight_bytes
    return held.peak_bytes, hidden + weight


def check_peak(rank: int, world_size: int, spec: Spec) -> int:
    """Two-sided; returns the measured transient."""
    tensors = make(spec)
    head = head_of(spec, tensors)
    step = program(spec, tensors, rank, collectives.world() if world_size > 1 else None)
    step()
    measured = measured_peak(step)
    flat, kept = formula(spec, head, rank)
    slack = ROW_SLACK_BYTES * (max(head.rows) + tiles_rows(spec, head)) + 4096
    assert_peak(measured - kept, flat, slack, f"{WHY}: {spec}")
    return measured - kept


def tiles_rows(spec: Spec, head: Head) -> int:
    limits = VocabPolicy(spec.schedule, **spec.sizes).limits(0, CPU_SCRATCH_BYTES)
    return tiles(spec.schedule, head, limits).tile_tokens * head.ranks


BASE = Spec(rows=(512,), shards=(8192,), width=WIDTH, sizes={"budget_bytes": 2 * MiB}, ignored=0.0)


@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_the_transient_is_the_budgets(schedule: str, dtype: str, ignored: float) -> None:
    check_peak(0, 1, BASE.but(schedule=schedule, dtype=dtype, ignored=ignored))


def test_the_entropy_costs_one_scratch_more() -> None:
    check_peak(0, 1, BASE.but(schedule="weights", want=("loss", "entropy")))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["one_pass", "weights", "activations"])
def test_the_transient_is_the_budgets_on_several_ranks(schedule: str, ranks: int) -> None:
    spec = BASE.but(rows=(256,) * ranks, shards=(2048,) * ranks, schedule=schedule, sizes={"budget_bytes": MiB})
    run_ranks(check_peak, ranks, spec)


def check_flat(schedule: str, rows: tuple[int, int], vocabs: tuple[int, int], budget_bytes: int) -> None:
    spec = BASE.but(schedule=schedule, sizes={"budget_bytes": budget_bytes})
    held = {}
    for num_rows, vocab in ((rows[0], vocabs[0]), (rows[1], vocabs[0]), (rows[0], vocabs[1])):
        held[num_rows, vocab] = check_peak(0, 1, spec.but(rows=(num_rows,), shards=(vocab,)))
    assert max(held.values()) <= 1.01 * min(held.values()), held


@pytest.mark.parametrize("schedule", ["local", "weights"])
def test_the_transient_moves_by_less_than_a_hundredth_over_8_times_the_tokens_and_vocabulary(schedule: str) -> None:
    check_flat(schedule, (256, 2048), (8192, 65_536), 8 * MiB)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["local", "weights"])
def test_the_transient_moves_by_less_than_a_hundredth_from_2k_to_16k_tokens_and_32k_to_256k_rows(schedule: str) -> None:
    check_flat(schedule, (2048, 16_384), (32_768, 262_144), 32 * MiB)


def largest_allocation(rank: int, world_size: int, spec: Spec) -> int:
    step = program(spec, make(spec), rank, collectives.world() if world_size > 1 else None)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_tensor_of_tokens_times_vocabulary_shard_is_ever_allocated(ranks: int) -> None:
    spec = Spec(rows=(256,) * ranks, shards=(2000,) * ranks, width=WIDTH, sizes={"budget_bytes": 65_536}, ignored=0.0)
    for schedule in (["local"] if ranks == 1 else ["one_pass"]) + ["weights", "activations"]:
        for dtype in ("float32", "bfloat16"):
            largest = run_ranks(largest_allocation, ranks, spec.but(schedule=schedule, dtype=dtype))
            named = 2000 * WIDTH * 4  # the gradient of the weight
            assert max(largest) <= max(65_536, named) < 256 * 2000 * 2, (schedule, dtype)
