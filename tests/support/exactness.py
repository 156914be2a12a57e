"""The two grades of exactness, with tolerances that come from data.

*bitwise*: the same bits. *reordered*: the same real-number expression in another order of sums; its error against
float64 may be no larger than the plain program's own error in the same dtype, plus a rounding band from eps and the
length of the longest sum.
"""

from __future__ import annotations

import math

import torch


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    """Equal dtype, shape and bits (NaNs with equal bits are equal); names the first coordinate that differs."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    mine, theirs = _bits(actual), _bits(expected)
    if torch.equal(mine, theirs):
        return
    wrong = (mine != theirs).reshape(actual.shape)
    first = tuple(int(i) for i in wrong.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {first}: "
        f"{actual[first].item()!r} is not {expected[first].item()!r}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(words[tensor.element_size()])


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth, in float64; the plain norm where the truth is zero."""
    difference = (actual.detach().double() - truth.detach().double()).norm().item()
    scale = truth.detach().double().norm().item()
    return difference / scale if scale else difference


def rounding_band(dtype: torch.dtype, length: int) -> float:
    """What another order of summing `length` terms may cost: sqrt(length) roundings of the accumulator (float32 for
    narrower dtypes), which add like a random walk, and one rounding of the result to `dtype`."""
    accumulator = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return accumulator * math.sqrt(max(1, length)) + torch.finfo(dtype).eps / 2


def assert_reordered(
    ours: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor, *, length: int, what: str = "tensor"
) -> None:
    """`ours` is as near to float64 `truth` as the `plain` program in the same dtype, plus the rounding band."""
    assert truth.dtype == torch.float64, f"{what}: the truth is {truth.dtype}, not float64"
    assert ours.shape == truth.shape, f"{what}: shape {tuple(ours.shape)} is not {tuple(truth.shape)}"
    assert ours.dtype == plain.dtype, f"{what}: dtype {ours.dtype} is not the plain program's {plain.dtype}"
    assert_error(ours, truth, relative_error(plain, truth), length=length, what=what)


def assert_error(
    ours: torch.Tensor, truth: torch.Tensor, plain: float, *, length: int, dtype: torch.dtype | None = None,
    what: str = "tensor",
) -> None:  # fmt: skip
    """`ours` is no farther from float64 `truth` than the `plain` program's own error plus the rounding band of `dtype`
    (that of `ours`, unless it was computed in a narrower one)."""
    mine, most = relative_error(ours, truth), plain + rounding_band(dtype or ours.dtype, length)
    assert mine <= most, f"{what}: error {mine:.3e} against float64; plain {plain:.3e}, allowed {most:.3e}"
