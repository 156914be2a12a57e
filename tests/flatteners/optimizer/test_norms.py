"""Global norms: exact sums, each parameter once, gradients untouched by a refusal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steppe
from steppe.core.errors import ShapeError
from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.kernel import load_kernel
from steppe.flatteners.optimizer.norms import NonFiniteGradients, squares, total_norm
from tests.support.exactness import assert_bitwise

from .programs import CPU, DTYPES, give, parameters


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_the_exactly_rounded_one(dtype: torch.dtype) -> None:
    held = parameters(dtype)
    give(held, 0)
    norm = steppe.clip_grad_norm_(held, math.inf)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(reference.grad_norm([p.grad for p in held]), rel=1e-15)


def test_gradients_are_clipped_as_torch_clips_them() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    give(ours, 0)
    give(theirs, 0)
    norm = steppe.clip_grad_norm_(ours, 1.0)
    factor = 1.0 / (norm.item() + 1e-6)
    for mine, other in zip(ours, theirs):
        assert_bitwise(mine.grad, other.grad * factor)
    plain = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    exact = reference.grad_norm([p.grad / factor for p in ours])
    assert abs(norm.item() - exact) <= abs(plain.item() - exact)


def test_below_the_limit_no_gradient_changes() -> None:
    held = parameters(torch.bfloat16)
    give(held, 0)
    before = [p.grad.clone() for p in held]
    steppe.clip_grad_norm_(held, 1e9)
    for parameter, old in zip(held, before):
        assert_bitwise(parameter.grad, old)


@given(st.permutations(range(6)))
def test_the_order_of_the_parameters_changes_no_bit(order: list[int]) -> None:
    vectors = [torch.randn(7000 * i + 1, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(6)]
    parts = [(squares(vector, load_kernel()), 1) for vector in vectors]
    assert total_norm(parts, None, CPU) == total_norm([parts[i] for i in order], None, CPU)


def test_tied_and_repeated_parameters_count_once() -> None:
    parameter = torch.nn.Parameter(torch.ones(10))
    parameter.grad = torch.full((10,), 2.0)
    assert steppe.clip_grad_norm_([parameter, parameter], math.inf).item() == math.sqrt(40.0)


def test_no_gradient_gives_norm_zero() -> None:
    assert steppe.clip_grad_norm_(parameters(torch.float32), 1.0).item() == 0.0
    assert steppe.clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_can_be_an_error_that_changes_nothing(bad: float) -> None:
    held = parameters(torch.float32)
    give(held, 0)
    held[0].grad[3, 3] = bad
    before = [p.grad.clone() for p in held]
    with pytest.raises(NonFiniteGradients, match="no gradient was changed"):
        steppe.clip_grad_norm_(held, 1.0, error_if_nonfinite=True)
    for parameter, old in zip(held, before):
        assert_bitwise(parameter.grad, old)
    steppe.clip_grad_norm_(held, 1.0)
    assert held[0].grad.isnan().any(), "without the flag a non-finite gradient stays visible, as in torch"


def test_a_sparse_gradient_is_refused() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ShapeError, match="sparse=False"):
        steppe.clip_grad_norm_(table.parameters(), 1.0)
