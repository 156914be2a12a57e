"""The peak from the allocator's events against budget.py, from both sides, for any routing and any N."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from steppe.core.units import MiB
from steppe.flatteners.dispatch.budget import DispatchPolicy, LayerShape, chunk_tokens, cost
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.profiles import forced_routes
from steppe.flatteners.dispatch.reference import plain_experts
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool
from tests.flatteners.dispatch import on_ranks
from tests.support.peaks import assert_peak, measured_peak
from tests.support.ranks import run_ranks


@dataclass(frozen=True)
class Layer:
    tokens: int = 2048
    hidden: int = 128
    width: int = 64
    experts: int = 16
    choices: int = 4
    chunk_tokens: int = 128
    dtype: torch.dtype = torch.float32
    routing: str = "balanced"
    overlap: bool = False

    def shape(self) -> LayerShape:
        size = self.dtype.itemsize
        return LayerShape(
            self.tokens, self.choices, self.experts, 1, self.hidden, self.width, size, 3 * self.hidden * self.width,
            size, overlap=self.overlap,
        )  # fmt: skip

    def policy(self) -> DispatchPolicy:
        return DispatchPolicy(chunk_tokens=self.chunk_tokens)

    def experts_weights(self) -> ExpertWeights:
        draw = lambda *shape: (torch.randn(shape) * 0.1).to(self.dtype).requires_grad_()  # noqa: E731
        return ExpertWeights(
            draw(self.experts, 2 * self.width, self.hidden), draw(self.experts, self.hidden, self.width)
        )

    def routes(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = forced_routes(self.routing, num_tokens=self.tokens, num_experts=self.experts, num_choices=self.choices)
        return torch.from_numpy(ids), torch.full(ids.shape, 1 / self.choices).requires_grad_()


def peak_of(layer: Layer, program=None) -> int:
    """Bytes above the inputs of one forward and backward, the upstream gradient (made inside) included."""
    experts, (ids, weights) = layer.experts_weights(), layer.routes()
    tokens = torch.randn(layer.tokens, layer.hidden, dtype=layer.dtype).requires_grad_()

    def step() -> None:
        pool = WorkspacePool(overlap=layer.overlap)
        run = program or (lambda *a: pipelined_llep(*a, session=Session(layer.policy(), pool=pool)))
        out = run(tokens, ids, weights, experts)
        out.backward(torch.ones_like(out))
        pool.close()

    step()  # one-time buffers of libraries
    for tensor in (tokens, weights, *experts.tensors):
        tensor.grad = None
    return measured_peak(step)


def slack(layer: Layer) -> tuple[int, str]:
    """What the formula leaves out, by name."""
    routes = layer.tokens * layer.choices
    indices = 4 * 4 * (layer.chunk_tokens * layer.choices + 1)
    return indices + 4 * routes + 16 * 1024, "int32 indices of a chunk, route weights in the dtype of sums, tables"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_the_budgets_from_both_sides(dtype: torch.dtype, overlap: bool) -> None:
    for routing in ("balanced", "95/4", "95/1"):
        layer = Layer(dtype=dtype, routing=routing, overlap=overlap)
        assert_peak(peak_of(layer), cost(layer.shape(), layer.policy()).peak_bytes, *slack(layer))


def test_the_peak_does_not_depend_on_routing() -> None:
    peaks = [peak_of(Layer(routing=routing)) for routing in ("balanced", "95/1", "30/4")]
    allowed, _ = slack(Layer())
    assert max(peaks) - min(peaks) <= allowed // 4  # a chunk with fewer rows has shorter indices


def test_four_times_the_tokens_add_inputs_and_outputs_only() -> None:
    small, large = Layer(tokens=1024), Layer(tokens=4096)
    grown = {n: getattr(cost(large.shape(), large.policy()), n) - getattr(cost(small.shape(), small.policy()), n)
             for n in ("workspace", "weight_gradients", "gradient_sums", "output", "token_gradients")}  # fmt: skip
    assert grown["workspace"] == grown["weight_gradients"] == grown["gradient_sums"] == 0
    outside = grown["output"] + grown["token_gradients"]
    numbers_of_routes = 3 * (large.tokens - small.tokens) * large.choices * 4
    assert peak_of(large) - peak_of(small) <= outside + numbers_of_routes + 64 * 1024


def test_two_hundred_steps_of_a_drifting_router_hold_the_same_bytes() -> None:
    layer = Layer(tokens=256, chunk_tokens=16, hidden=32, width=16)
    experts, dice = layer.experts_weights(), random.Random(1)
    session = Session(layer.policy(), pool=WorkspacePool(max_tokens=layer.tokens))
    tokens = torch.randn(layer.tokens, layer.hidden).requires_grad_()
    weights = torch.full((layer.tokens, layer.choices), 0.25).requires_grad_()

    def step(share: float) -> None:
        scores = torch.rand(layer.tokens, layer.experts)
        scores[:, 3] += share * dice.uniform(0.9, 1.1)
        out = pipelined_llep(tokens, scores.topk(layer.choices).indices, weights, experts, session=session)
        out.backward(torch.ones_like(out))
        for tensor in (tokens, weights, *experts.tensors):
            tensor.grad = None

    peaks = []
    for index in range(200):
        if index % 40 == 0 or index == 199:
            peaks.append(measured_peak(lambda: step(index / 100)))  # noqa: B023
        else:
            step(index / 100)
    assert session.pool.counters["allocations"] == 1
    assert max(peaks[1:]) - min(peaks[1:]) <= 16 * 1024


def test_the_anchor_case_is_at_most_22_percent_of_the_saved_everything_peak() -> None:
    layer = Layer(tokens=16_384, hidden=512, width=256, experts=32, choices=4, chunk_tokens=1024)
    flat, plain = peak_of(layer), peak_of(layer, plain_experts)
    assert flat <= 0.22 * plain, (flat / MiB, plain / MiB)


def test_float32_route_weights_make_no_float32_rows() -> None:
    """A bf16 layer's peak with float32 weights stays below one float32 [N*k, H]."""
    layer = Layer(dtype=torch.bfloat16, tokens=4096, hidden=64, width=32, experts=8)
    assert peak_of(layer) < layer.tokens * layer.choices * layer.hidden * 4


def test_bytes_and_the_methods_formula_give_the_cap() -> None:
    shape = Layer(tokens=65_536).shape()
    assert chunk_tokens(DispatchPolicy(micro_chunks=10), shape) == 6554
    assert chunk_tokens(DispatchPolicy(chunk_tokens=77), shape) == 77
    from_bytes = chunk_tokens(DispatchPolicy(chunk_bytes=8 * MiB), shape)
    held = cost(shape, DispatchPolicy(chunk_tokens=from_bytes)).workspace
    assert held <= 8 * MiB < cost(shape, DispatchPolicy(chunk_tokens=from_bytes + 1)).workspace
    assert chunk_tokens(DispatchPolicy(), replace(shape, num_tokens=100)) == 100


def over_ranks(tokens: int, chunk: int) -> tuple[LayerShape, DispatchPolicy]:
    return LayerShape(tokens, 4, 32, 4, 512, 256, 4, 3 * 512 * 256, 4), DispatchPolicy(chunk_tokens=chunk)


def check_over_ranks(profiles: list[str], tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Every rank's peak is the formula's for every profile; gives the largest (flat, plain) of each."""
    shape, policy = over_ranks(tokens, chunk)
    results = run_ranks(on_ranks.peaks, 4, shape, profiles, policy, timeout_s=200.0)
    held = cost(shape, policy)
    formula = held.peak_bytes - held.tile - tokens * shape.hidden * 4  # the upstream gradient is made outside
    why = "the tile (a chunk that is not full needs a smaller one), int32 indices of a chunk, tables"
    for rank in results:
        for flat, _ in rank:
            assert_peak(flat, formula, held.tile + 2**17, why)
        assert max(flat for flat, _ in rank) - min(flat for flat, _ in rank) <= held.tile
    return [(max(rank[i][0] for rank in results), max(rank[i][1] for rank in results)) for i in range(len(profiles))]


def test_over_ranks_the_peak_is_the_budgets_whatever_the_routing() -> None:
    _, (worst, hot) = check_over_ranks(["balanced", "95/1"], tokens=512, chunk=32)
    assert worst < hot / 2


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "share"), [("balanced", 0.25), ("95/1", 0.10)])
def test_over_ranks_the_peak_is_a_quarter_of_plain_and_a_tenth_of_its_hot_rank(profile: str, share: float) -> None:
    """16,384 tokens a rank, H 512, I 256, E 32, k 4, 16 chunks; the formula holds from both sides as well."""
    ((flat, plain),) = check_over_ranks([profile], tokens=16_384, chunk=1024)
    print(f"{profile}: {flat / MiB:.1f} of {plain / MiB:.1f} MiB, {flat / plain:.3f}")
    assert flat <= share * plain, (flat / MiB, plain / MiB)


@pytest.mark.parametrize(("ranks", "steps"), [(3, 8), pytest.param(2, 200, marks=pytest.mark.slow)])
def test_over_ranks_a_router_that_drifts_to_one_expert_holds_the_same_bytes(ranks: int, steps: int) -> None:
    for *measured, transfers in run_ranks(on_ranks.drifting, ranks, steps):
        assert transfers > 0  # at the end experts travel
        assert max(measured[1:]) - min(measured[1:]) <= 16 * 1024, measured
