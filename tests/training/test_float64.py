"""The float64 truth is float64: its own rounding is far below float32's, and it is the same function."""

from __future__ import annotations

import pytest
import torch

from tests.support.float64 import FAMILIES, float64_truth, toy_model


@pytest.mark.parametrize("family", FAMILIES)
def test_truth_is_the_same_function_within_float32_rounding(family: str) -> None:
    torch.manual_seed(1)
    model = toy_model(family)
    truth = float64_truth(model)
    ids = torch.randint(0, 256, (2, 24))
    plain, exact = model(input_ids=ids).logits, truth(input_ids=ids).logits
    assert exact.dtype == torch.float64
    error = (plain.double() - exact).abs().max() / exact.abs().max()
    layers_and_width = 4 * 32 * 2
    assert error < torch.finfo(torch.float32).eps * layers_and_width


@pytest.mark.parametrize("family", FAMILIES)
def test_truth_has_no_float32_left_inside(family: str) -> None:
    model = toy_model(family)
    truth = float64_truth(model)
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(2))
    seen: set[torch.dtype] = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point():
                seen.add(out.dtype)
            return out

    with Watch():
        truth(input_ids=ids, labels=ids).loss.backward()
    assert seen == {torch.float64}
