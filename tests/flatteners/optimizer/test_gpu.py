"""On an accelerator: the CPU's bits, nothing of the optimizer left in its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.units import MiB
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.schedule import device_slots
from steppe.runtime.allocator import allocator_peak
from tests.support.exactness import assert_bitwise
from tests.support.peaks import assert_peak

from .programs import DTYPES, gradients, parameters, train

pytestmark = pytest.mark.gpu
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
needs_accelerator = pytest.mark.skipif(ACCELERATOR is None, reason="no accelerator")


def _train(dtype: torch.dtype, steps: int = 3, **settings: Any) -> tuple[list[nn.Parameter], OffloadStreamAdamW]:
    held = [nn.Parameter(p.detach().to(ACCELERATOR)) for p in parameters(dtype)]
    optimizer = OffloadStreamAdamW(held, lr=1e-2, **settings)
    for step in range(steps):
        for parameter, gradient in zip(held, gradients(held, step)):
            parameter.grad = gradient.to(ACCELERATOR)
        optimizer.step()
        optimizer.zero_grad()
    return held, optimizer


@needs_accelerator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bucket_bytes": 4096}, {"bucket_bytes": 8192, "slots": 3}, {"update": "device", "bucket_bytes": 8192},
     {"overlap_backward": True, "bucket_bytes": 4096}, {"overlap_backward": True, "update": "device"}],
    ids=str,
)  # fmt: skip
def test_the_bits_are_those_of_the_cpu(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    ours, optimizer = _train(dtype, **settings)
    theirs, plain = train(dtype)
    for index, (mine, other) in enumerate(zip(ours, theirs)):
        assert_bitwise(mine.detach().cpu(), other.detach(), f"parameter {index}")
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert optimizer.state[mine][key].device.type == "cpu"
            assert_bitwise(optimizer.state[mine][key], plain.state[other][key], f"{key} of parameter {index}")


@needs_accelerator
@pytest.mark.parametrize("update", ["host", "device"])
def test_a_step_holds_its_slots_on_the_device_and_no_more(update: str) -> None:
    count, bucket = 8 * MiB, 8 * MiB
    held = [nn.Parameter(torch.randn(count // 4, device=ACCELERATOR, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = OffloadStreamAdamW(held, update=update, bucket_bytes=bucket)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    peak = allocator_peak(optimizer.step, device=ACCELERATOR)
    formula = device_slots(bucket, 2, 3, count).num_bytes if update == "device" else 0
    why = "the caching allocator rounds each tensor up to 512 bytes and large ones to 2 MiB; probes of 64 elements"
    assert_peak(peak.peak_bytes - peak.base_bytes, formula, 8 * MiB, why)


@needs_accelerator
def test_weights_are_complete_before_the_next_forward_reads_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2048, 2048, bias=False, device=ACCELERATOR, dtype=torch.bfloat16)
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, bucket_bytes=MiB)
    batch = torch.randn(8, 2048, device=ACCELERATOR, dtype=torch.bfloat16)
    for _ in range(5):
        model(batch).float().square().mean().backward()
        optimizer.step()
        seen = model(batch).clone()
        torch.accelerator.synchronize()
        assert_bitwise(model(batch), seen)
        optimizer.zero_grad()
