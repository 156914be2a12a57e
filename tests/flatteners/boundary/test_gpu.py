"""On an accelerator: the same bits and two boundaries, though the host runs ahead of the device."""

from __future__ import annotations

import pytest
import torch

from steppe import SCO, BoundaryPolicy
from steppe.flatteners.boundary.reference import checkpointed
from steppe.runtime.allocator import allocator_peak
from tests.flatteners.boundary.programs import Block
from tests.support.exactness import assert_bitwise
from tests.support.peaks import assert_peak

N, H, L = 8192, 1024, 16
SIZE = N * H * 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def program():
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator()
    blocks = torch.nn.ModuleList(Block(H, dropout=0.1) for _ in range(L)).to(device, torch.bfloat16)
    row = torch.nn.Parameter(torch.ones(1, H, device=device, dtype=torch.bfloat16))
    for parameter in (row, *blocks.parameters()):
        parameter.grad = torch.zeros_like(parameter)

    def step(checkpoint):
        torch.manual_seed(1)
        hidden = row.expand(N, H) * 1.0
        for block in blocks:
            hidden = checkpoint(block, hidden)
        loss = hidden.float().square().mean()
        del hidden
        loss.backward()
        return loss.detach()

    return blocks, step


def test_gradients_are_bitwise_on_an_accelerator():
    results = []
    for checkpoint in (checkpointed, SCO().checkpoint):
        blocks, step = program()
        results.append(
            {f"loss {i}": step(checkpoint) for i in range(3)} | {n: p.grad for n, p in blocks.named_parameters()}
        )
    for name, expected in results[0].items():
        assert_bitwise(results[1][name].cpu(), expected.cpu(), name)


def test_two_boundaries_are_on_the_accelerator_however_far_the_host_runs_ahead():
    peaks = {}
    for name, checkpoint in (("plain", checkpointed), ("sco", SCO(BoundaryPolicy()).checkpoint)):
        _, step = program()
        step(checkpoint)
        peak = allocator_peak(lambda step=step, checkpoint=checkpoint: step(checkpoint))
        peaks[name] = peak.peak_bytes - peak.base_bytes
    assert_peak(peaks["plain"] - peaks["sco"], (L - 3) * SIZE, SIZE, "one boundary may still be in transit")
