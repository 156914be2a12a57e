"""Gradients leave during backward: freed at once, summed in float32, clipped exactly."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.errors import LaneError
from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.engine import Wiring
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.peaks import assert_peak, measured_peak

from .programs import delayed_lines, hazardous

WIDTH = 48


def _model(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(dtype)
    if tied:
        model[-1].weight = model[0].weight
    return model


def _batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(5)))


def _backward(model: nn.Module, batch: torch.Tensor, parts: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    (model(batch.to(dtype)).float().square().mean() / parts).backward()


def _run(model: nn.Module, steps: int = 3, micro_batches: int = 1, **settings: Any) -> OffloadStreamAdamW:
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, **settings)
    optimizer.materialize()
    batches = iter(_batches(steps * micro_batches))
    for _ in range(steps):
        for number in range(micro_batches):
            optimizer.set_is_last_backward(number == micro_batches - 1)
            _backward(model, next(batches), micro_batches)
            if settings.get("overlap_backward"):
                assert all(p.grad is None for p in model.parameters()), "gradients have left"
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters()):
        assert_bitwise(mine, other, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [{}, {"wiring": "lanes"}, {"update": "device"}], ids=str)
def test_one_backward_a_step_gives_the_bits_of_no_overlap(
    dtype: torch.dtype, tied: bool, settings: dict[str, Any]
) -> None:
    ours, theirs = _model(dtype, tied=tied), _model(dtype, tied=tied)
    wired = {**settings, "wiring": hazardous(3)} if "wiring" in settings else settings
    optimizer = _run(ours, overlap_backward=True, bucket_bytes=4096, max_norm=0.01, **wired)
    plain = _run(theirs, max_norm=0.01)
    assert optimizer.grad_norm == plain.grad_norm
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm > 0.01, "clipping is active"
    _assert_same(ours, theirs)


@pytest.mark.parametrize("announced", [True, False])
def test_micro_batches_are_summed_in_float32_and_clipped_by_the_norm_of_the_sum(announced: bool) -> None:
    model = _model()
    optimizer = OffloadStreamAdamW(
        model.parameters(), lr=1e-2, overlap_backward=True, max_norm=0.05, wiring=Wiring(open_lines=delayed_lines(1))
    )
    optimizer.materialize()
    masters = [reference.state_of(p, torch.zeros(0).numpy().dtype.type) for p in model.parameters()]
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    twin = _model()
    for number, batch in enumerate(_batches(3)):
        if announced:
            optimizer.set_is_last_backward(number == 2)
        _backward(model, batch, 3)
        _backward(twin, batch, 3)
        for total, parameter in zip(sums, twin.parameters()):
            total += parameter.grad.float()
        twin.zero_grad()
    optimizer.step()
    norm = reference.grad_norm(sums)
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-15)
    for state, total in zip(masters, sums):
        reference.step(state, total, reference.Adam(lr=1e-2), scale=0.05 / (optimizer.grad_norm + 1e-6))
    for state, parameter in zip(masters, model.parameters()):
        assert_bitwise(parameter, reference.written(state, parameter))


def test_accumulation_is_nearer_to_the_truth_than_sums_in_the_parameters_dtype() -> None:
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in _model().parameters()]
    ours, plain = _model(), _model()
    optimizer = OffloadStreamAdamW(ours.parameters(), overlap_backward=True, max_norm=math.inf)
    optimizer.materialize()
    for batch in _batches(16):
        _backward(ours, batch, 16)
        _backward(plain, batch, 16)
        alone = _model()
        _backward(alone, batch, 16)
        for total, parameter in zip(exact, alone.parameters()):
            total += parameter.grad.double()
    optimizer._engine.arrivals.land()
    for row, parameter, truth in zip(optimizer._rows.values(), plain.parameters(), exact):
        assert row.gradient is not None
        total = row.gradient.view(parameter.shape)
        assert_reordered(total, parameter.grad.float(), truth, length=16, what="sum of 16 gradients")


def test_a_gradient_is_freed_while_the_backward_still_runs() -> None:
    model = _model(torch.float32)
    optimizer = OffloadStreamAdamW(model.parameters(), overlap_backward=True)
    optimizer.materialize()
    born: list[weakref.ref[torch.Tensor]] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: born.append(weakref.ref(gradient)))
    alive: list[int] = []

    def count(*_: object) -> None:
        optimizer._engine.arrivals.land()
        gc.collect()
        alive.append(sum(ref() is not None for ref in born))

    model[0].register_full_backward_hook(count)
    _backward(model, _batches(1)[0])
    assert len(born) == 8
    assert alive[0] <= 3, "of six gradients behind the first layer, at most the last one's and what is in its hook"


def test_gradients_do_not_peak_with_the_number_of_layers() -> None:
    width, layers = 256, 24
    gradient = width * width * 4

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    def peak(**settings: Any) -> int:
        model = nn.Sequential(*(Square() for _ in range(layers)))
        optimizer = OffloadStreamAdamW(model.parameters(), bucket_bytes=gradient, slots=2, **settings)
        optimizer.materialize()
        out = model(torch.randn(1, width)).sum()
        return measured_peak(out.backward)

    assert_peak(peak(), layers * gradient, 2 * gradient, "activation gradients of [1, width] and a product's scratch")
    why = "the window of two buckets may be empty at the peak; one gradient is being made, activations are [1, width]"
    assert_peak(peak(overlap_backward=True), gradient, 3 * gradient, why)


def test_before_materialize_gradients_stay_where_they_are() -> None:
    model = _model()
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, overlap_backward=True)
    _backward(model, _batches(1)[0])
    assert all(p.grad is not None for p in model.parameters()), "no hook may allocate the state"
    optimizer.step()
    twin = _model()
    plain = OffloadStreamAdamW(twin.parameters(), lr=1e-2)
    _backward(twin, _batches(1)[0])
    plain.step()
    _assert_same(model, twin)
    _backward(model, _batches(1)[0])
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_forgets_what_has_left() -> None:
    model, twin = _model(), _model()
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, overlap_backward=True, max_norm=1.0)
    optimizer.materialize()
    first, second = _batches(2)
    _backward(model, first)
    optimizer.zero_grad()
    _backward(model, second)
    optimizer.step()
    plain = OffloadStreamAdamW(twin.parameters(), lr=1e-2, max_norm=1.0)
    _backward(twin, second)
    plain.step()
    assert optimizer.grad_norm == plain.grad_norm
    _assert_same(model, twin)


def test_a_parameter_without_arrivals_takes_no_step_and_last_steps_sum_is_not_used_again() -> None:
    model = _model()
    optimizer = _run(model, steps=1, overlap_backward=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for parameter, old in zip(model.parameters(), before):
        assert_bitwise(parameter, old)
        assert int(optimizer.state[parameter]["step"]) == 1


def test_a_non_finite_norm_skips_the_step_before_any_state_changes() -> None:
    for overlap in (False, True):
        model = _model()
        optimizer = _run(model, steps=1, overlap_backward=overlap, max_norm=1.0)
        before = [t.clone() for t in _everything(model, optimizer)]
        bad = _batches(1)[0]
        bad[0, 0] = torch.inf
        _backward(model, bad)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.grad_norm is not None
        assert not math.isfinite(optimizer.grad_norm)
        assert (optimizer.stats()["skipped"], optimizer.stats()["steps"]) == (1, 1)
        for ours, old in zip(_everything(model, optimizer), before):
            assert_bitwise(ours, old)
        _backward(model, _batches(1)[0])
        optimizer.step()
        assert optimizer.stats()["steps"] == 2, "the next finite step is taken"


def _everything(model: nn.Module, optimizer: OffloadStreamAdamW) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.detach()
        yield from (optimizer.state[parameter][key] for key in ("step", "master", "exp_avg", "exp_avg_sq"))


def test_a_state_loaded_between_backward_and_step_keeps_the_gradients_that_left() -> None:
    model, twin = _model(), _model()
    optimizer = _run(model, steps=1, overlap_backward=True, wiring=hazardous(2))
    plain = _run(twin, steps=1)
    for each, steps in ((model, optimizer), (twin, plain)):
        _backward(each, _batches(1)[0])
        steps.load_state_dict(steps.state_dict())
        steps.step()
    _assert_same(model, twin)


def test_a_failing_backward_leaves_an_optimizer_that_goes_on() -> None:
    model, twin = _model(), _model()
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, overlap_backward=True)
    optimizer.materialize()

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("a user's hook failed")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="a user's hook failed"):
        _backward(model, _batches(2)[0])
    handle.remove()
    optimizer.zero_grad()
    _backward(model, _batches(2)[1])
    optimizer.step()
    plain = OffloadStreamAdamW(twin.parameters(), lr=1e-2)
    _backward(twin, _batches(2)[1])
    plain.step()
    _assert_same(model, twin)


def test_a_failed_accumulation_is_raised_at_the_next_call() -> None:
    model = _model()
    optimizer = OffloadStreamAdamW(
        model.parameters(), overlap_backward=True, wiring=Wiring(open_lines=delayed_lines(0, longest_s=0.0))
    )
    optimizer.materialize()

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    optimizer._engine.arrivals._add = fail  # type: ignore[method-assign]

    def train() -> None:
        _backward(model, _batches(1)[0])
        optimizer.step()

    with pytest.raises(LaneError, match=r"stage 'accumulate', buffer 'parameter of shape .*no room"):
        train()


def test_closed_optimizers_let_gradients_stay() -> None:
    model = _model()
    optimizer = OffloadStreamAdamW(model.parameters(), overlap_backward=True)
    optimizer.materialize()
    optimizer.close()
    _backward(model, _batches(1)[0])
    assert all(p.grad is not None for p in model.parameters())


def test_a_dropped_optimizer_is_freed_in_spite_of_its_hooks() -> None:
    model = _model()
    optimizer = OffloadStreamAdamW(model.parameters(), overlap_backward=True)
    optimizer.materialize()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    _backward(model, _batches(1)[0])
    assert all(p.grad is not None for p in model.parameters())
