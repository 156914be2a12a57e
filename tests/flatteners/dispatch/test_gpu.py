"""One CUDA device: exactness, determinism, peak against the formula, and pack and combine beside the GEMMs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from steppe.core.units import GiB
from steppe.flatteners.dispatch.budget import TILE_ELEMENTS, DispatchPolicy, LayerShape, cost
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.profiles import forced_routes
from steppe.flatteners.dispatch.reference import dense_loop, plain_experts
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool
from steppe.runtime.allocator import allocator_peak
from tests.flatteners.dispatch.cases import FORMS, Case, Inputs, flat, gradients, make_experts, make_inputs, new_session
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.peaks import assert_peak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def on_device(case: Case) -> tuple[ExpertWeights, Inputs]:
    experts, inputs = make_experts(case), make_inputs(case, 0)
    move = lambda t: t.detach().cuda().requires_grad_(t.requires_grad)  # noqa: E731
    names = [n for n in ("gate_up", "down", "gate_up_bias", "down_bias") if getattr(experts, n) is not None]
    moved = replace(experts, **{n: move(getattr(experts, n)) for n in names})
    return moved, Inputs(*(move(getattr(inputs, n)) for n in Inputs.__annotations__))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_gradient_equals_the_dense_loop_on_the_device(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for form in FORMS:
        for routing in ("random", "95/1", "same_twice"):
            case = Case(form, routing, dtype, tokens=(61,), hidden=32, width=16)
            experts, inputs = on_device(case)
            ours = gradients(flat(new_session(case, poison=True)), experts, inputs)
            plain = gradients(dense_loop, experts, inputs)
            exact = gradients(dense_loop, make_experts(case, torch.float64), make_inputs(case, 0, torch.float64))
            for name, truth in exact.items():
                assert_reordered(
                    ours[name].cpu(), plain[name].cpu(), truth, length=case.longest_sum, what=f"{case} {name}"
                )


def test_two_runs_on_the_device_give_the_same_bits() -> None:
    case = Case(routing="same_twice", dtype=torch.bfloat16, tokens=(500,), hidden=64, width=32, chunk_tokens=60)
    first, second = (gradients(flat(new_session(case)), *on_device(case)) for _ in range(2))
    for name, value in first.items():
        assert_bitwise(second[name].cpu(), value.cpu(), name)


class Anchor:
    """The method's own layer scaled to one rank, fewer tokens where `tokens` says so."""

    def __init__(self, profile: str, tokens: int) -> None:
        draw = lambda *s: torch.randn(s, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()  # noqa: E731
        self.experts = ExpertWeights(draw(16, 4096, 7168), draw(16, 7168, 2048))
        self.tokens = draw(tokens, 7168)
        ids = forced_routes(profile, num_tokens=tokens, num_experts=16, num_choices=8)
        self.ids = torch.from_numpy(ids).cuda()
        self.weights = torch.full(ids.shape, 0.125, device="cuda").requires_grad_()

    def step(self, program) -> None:
        for tensor in (self.tokens, self.weights, *self.experts.tensors):
            tensor.grad = None
        out = program(self.tokens, self.ids, self.weights, self.experts)
        out.backward(torch.ones_like(out))


def test_the_anchor_layers_peak_is_the_formulas_and_a_fraction_of_the_plain_programs() -> None:
    policy = DispatchPolicy(chunk_tokens=6554)
    shape = LayerShape(65_536, 8, 16, 1, 7168, 2048, 2, 3 * 7168 * 2048, 2, True, TILE_ELEMENTS["accelerator"])
    peaks = {}
    for profile in ("balanced", "95/1"):
        layer = Anchor(profile, 65_536)
        run = partial(layer.step, partial(pipelined_llep, policy=policy))
        peak = allocator_peak(run)
        peaks[profile] = peak.peak_bytes - peak.base_bytes
        # The combine gathers one choice's rows of a chunk; the caching allocator rounds to 2 MiB a block.
        slack = 6554 * 8 * 7168 * 2 // 4 + 2**28
        assert_peak(
            peaks[profile], cost(shape, policy).peak_bytes, slack, "rows of one choice, indices, rounding to 2 MiB"
        )
        del layer, run
        torch.accelerator.empty_cache()
    smaller = Anchor("balanced", 16_384)
    plain = allocator_peak(lambda: smaller.step(plain_experts))
    assert peaks["balanced"] < 0.5 * 4 * (plain.peak_bytes - plain.base_bytes), peaks["balanced"] / GiB


def test_packing_and_combining_run_beside_the_products() -> None:
    from torch.profiler import ProfilerActivity, profile

    layer, session = Anchor("balanced", 16_384), Session(DispatchPolicy(chunk_tokens=2048), pool=WorkspacePool())
    run = lambda: layer.step(lambda *a: pipelined_llep(*a, session=session))  # noqa: E731
    run()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        run()
        torch.cuda.synchronize()
    kernels = [
        e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us()
    ]
    gemms = [e.time_range for e in kernels if "gemm" in e.name.lower() or "nvjet" in e.name.lower()]
    moves = [e.time_range for e in kernels if "index" in e.name.lower() or "gather" in e.name.lower()]
    assert gemms
    assert moves
    beside = [m for m in moves if any(g.start < m.end and m.start < g.end for g in gemms)]
    assert len(beside) > len(moves) // 4
