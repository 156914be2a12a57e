"""Two-sided memory: what the budget says is what the allocator sees, on the device and on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.units import MiB
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.device import DevicePipeline
from steppe.flatteners.optimizer.engine import Wiring
from steppe.flatteners.optimizer.schedule import ALIGN, STATE_BYTES, aligned, device_slots, ring_slot_bytes
from steppe.runtime.arena import Arena
from tests.support.peaks import assert_peak, measured_peak

from .programs import delayed_lines

COUNT = 2**19
SMALL = "Python objects of lanes and threads own no tensors; what is left are 0-dim tensors and probes of 64 elements"


def _ready(**settings: Any) -> OffloadStreamAdamW:
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(COUNT // 4).to(torch.bfloat16)) for _ in range(4)]
    optimizer = OffloadStreamAdamW(held, **settings)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("bucket", "slots"), [(MiB // 2, 1), (MiB // 2, 2), (MiB // 4, 3), (64 * MiB, 2)])
def test_the_device_update_holds_its_slots_and_no_more(bucket: int, slots: int) -> None:
    optimizer = _ready(update="device", bucket_bytes=bucket, slots=slots)
    fit = device_slots(bucket, slots, 3, COUNT)
    assert fit.num_bytes <= slots * bucket
    assert_peak(measured_peak(optimizer.step), fit.num_bytes, 32 * 1024, SMALL)


@pytest.mark.parametrize("settings", [{}, {"wiring": Wiring(open_lines=delayed_lines(0))}, {"max_norm": 1.0}], ids=str)
def test_the_host_update_holds_nothing_on_the_device(settings: dict[str, Any]) -> None:
    optimizer = _ready(bucket_bytes=MiB // 2, **settings)
    assert_peak(measured_peak(optimizer.step), 0, 32 * 1024, SMALL)


def test_torchs_foreach_step_holds_a_transient_that_ours_has_not() -> None:
    held = [nn.Parameter(torch.randn(COUNT // 4)) for _ in range(4)]
    plain = torch.optim.AdamW(held, foreach=True)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    assert_peak(measured_peak(plain.step), 4 * COUNT, 4096, "0-dim step tensors")


@pytest.mark.parametrize(("overlap", "bytes_each"), [(False, STATE_BYTES), (True, STATE_BYTES + 4)])
def test_the_host_holds_12_bytes_a_parameter_and_rings(overlap: bool, bytes_each: int) -> None:
    state, rings = Arena("state", pin=False), Arena("rings", pin=False)
    wiring = Wiring(open_lines=delayed_lines(0, longest_s=0.0), state=state, rings=rings)
    optimizer = _ready(bucket_bytes=MiB // 4, slots=2, overlap_backward=overlap, wiring=wiring)
    assert_peak(state.reserved_bytes, bytes_each * COUNT, bytes_each * COUNT // 100, "tensors end on whole cache lines")
    assert rings.reserved_bytes == 2 * 2 * ring_slot_bytes(2 * COUNT, MiB // 4)
    stats = optimizer.stats()
    assert stats["host_state_bytes"] == state.reserved_bytes
    assert stats["host_ring_bytes"] == rings.reserved_bytes
    assert rings.high_water_bytes <= rings.reserved_bytes


@pytest.mark.parametrize("overlap", [False, True])
def test_float32_weights_in_host_memory_need_no_second_copy(overlap: bool) -> None:
    state = Arena("state", pin=False)
    held = [nn.Parameter(torch.randn(COUNT // 4)) for _ in range(4)]
    optimizer = OffloadStreamAdamW(held, overlap_backward=overlap, wiring=Wiring(state=state))
    optimizer.materialize()
    exact = (STATE_BYTES - 4 + 4 * overlap) * COUNT
    assert_peak(state.reserved_bytes, exact, exact // 100, "tensors end on whole cache lines")
    assert_peak(measured_peak(optimizer.state_dict), 4 * COUNT, 4096, "readers get a copy of the weights as masters")


def test_the_overhead_stays_below_one_percent_for_a_models_mix_of_tensors() -> None:
    hidden = 512
    shapes = [(hidden, hidden)] * 4 + [(hidden,)] * 4 + [(4 * hidden, hidden)] * 3 + [()]
    state = Arena("state", pin=False)
    held = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    OffloadStreamAdamW(held, wiring=Wiring(state=state)).materialize()
    exact = STATE_BYTES * sum(p.numel() for p in held)
    assert state.reserved_bytes == STATE_BYTES * sum(aligned(p.numel()) for p in held)
    assert_peak(state.reserved_bytes, exact, exact // 100, f"tensors end on {ALIGN}-element lines")


def test_memory_is_allocated_once_and_never_inside_a_hook() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state, rings = Arena("state", pin=False), Arena("rings", pin=False)
    wiring = Wiring(open_lines=delayed_lines(0, longest_s=0.0), state=state, rings=rings)
    optimizer = OffloadStreamAdamW(model.parameters(), overlap_backward=True, bucket_bytes=4096, wiring=wiring)
    assert state.reserved_bytes == rings.reserved_bytes == 0, "nothing before the declared moment"
    optimizer.materialize()
    before = (state.reserved_bytes, rings.reserved_bytes)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    assert (state.reserved_bytes, rings.reserved_bytes) == before
    assert rings.lent_bytes == 0, "every slot came back"


def test_device_slots_live_only_while_a_step_runs() -> None:
    optimizer = _ready(update="device", bucket_bytes=MiB // 2)
    assert isinstance(optimizer._engine.pipeline, DevicePipeline)
    assert not [v for v in vars(optimizer._engine.pipeline).values() if isinstance(v, torch.Tensor)]
