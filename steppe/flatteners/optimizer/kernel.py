"""The AdamW update of one piece on the host: the compiled kernel, and the same bits in numpy where there is none.

Both work on one-dimensional contiguous CPU tensors: float32 state, gradients and parameters in float32, bfloat16 or
float16. `load_kernel` says which of the two runs and why.

Note [plain IEEE]. torch's elementwise operators are not the reference here: `add(alpha=)`, `addcmul`, `addcdiv` and
`lerp` contract to fused multiply-adds on the CPU, and its float32 square root is not correctly rounded. numpy's
multiply, add, divide and sqrt are plain IEEE operations, so numpy and C built without contraction agree to the bit.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from steppe.core.errors import ShapeError
from steppe.flatteners.optimizer.schedule import SQUARE_BLOCK, Step

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LANES = 32  # partial sums of squares, as in adamw.c
TILE = 2**14  # elements that the numpy arithmetic works on at a time: its temporaries stay in the cache


class Kernel(Protocol):
    """What an implementation of the host arithmetic gives."""

    name: str

    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        parameter: torch.Tensor,
        step: Step,
    ) -> None:
        """One AdamW step over equal lengths; `parameter` is written, never read. It may be `master` itself."""

    def add(self, total: torch.Tensor, gradient: torch.Tensor, *, fresh: bool) -> None:
        """total = gradient (fresh) or total + gradient, in float32."""

    def squares(self, gradient: torch.Tensor) -> list[float]:
        """The sums of squares of blocks of SQUARE_BLOCK elements, in float64 and in one fixed order."""


class CompiledKernel:
    """`adamw.c` through ctypes, which releases the GIL during a call."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        library.steppe_adamw.argtypes = (*[pointer] * 4, number, pointer, number, count, pointer)
        library.steppe_add.argtypes = (pointer, pointer, number, count, number)
        library.steppe_squares.argtypes = (pointer, number, count, count, pointer)
        library.steppe_instructions.restype = ctypes.c_char_p
        self.name = f"compiled ({library.steppe_instructions().decode()})"

    def update(self, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, gradient: torch.Tensor,
               parameter: torch.Tensor, step: Step) -> None:  # fmt: skip
        constants = (ctypes.c_float * 7)(*step)
        refused = self._library.steppe_adamw(
            master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), gradient.data_ptr(), _kind(gradient),
            parameter.data_ptr(), _kind(parameter), master.numel(), constants,
        )  # fmt: skip
        assert refused == 0

    def add(self, total: torch.Tensor, gradient: torch.Tensor, *, fresh: bool) -> None:
        refused = self._library.steppe_add(
            total.data_ptr(), gradient.data_ptr(), _kind(gradient), total.numel(), int(fresh)
        )
        assert refused == 0

    def squares(self, gradient: torch.Tensor) -> list[float]:
        sums = np.empty(-(-gradient.numel() // SQUARE_BLOCK))
        refused = self._library.steppe_squares(
            gradient.data_ptr(), _kind(gradient), gradient.numel(), SQUARE_BLOCK, sums.ctypes.data
        )
        assert refused == 0
        return list(sums.tolist())


class NumpyKernel:
    """The same arithmetic in numpy, on tiles that fit the cache."""

    def __init__(self, reason: str) -> None:
        self.name = f"numpy ({reason})"

    def update(self, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, gradient: torch.Tensor,
               parameter: torch.Tensor, step: Step) -> None:  # fmt: skip
        constants = [np.float32(value) for value in step]
        arrays = [_array(vector) for vector in (master, exp_avg, exp_avg_sq, gradient, parameter)]
        for tile in _tiles(master.numel()):
            p, m, v, g, out = (array[tile] for array in arrays)
            w = _update_tile(p, m, v, _load(g, _kind(gradient)), constants)
            out[:] = _store(w, _kind(parameter))

    def add(self, total: torch.Tensor, gradient: torch.Tensor, *, fresh: bool) -> None:
        sums, gradients = _array(total), _array(gradient)
        for tile in _tiles(total.numel()):
            loaded = _load(gradients[tile], _kind(gradient))
            sums[tile] = loaded if fresh else sums[tile] + loaded

    def squares(self, gradient: torch.Tensor) -> list[float]:
        array = _array(gradient)
        blocks = range(0, array.size, SQUARE_BLOCK)
        return [_squares(_load(array[b : b + SQUARE_BLOCK], _kind(gradient))) for b in blocks]


@functools.cache
def load_kernel() -> Kernel:
    """The compiled kernel where it is built and gives numpy's bits; numpy, saying why, otherwise."""
    path = built_extension()
    if path is None:
        return NumpyKernel("the compiled kernel was not built")
    try:
        kernel = CompiledKernel(path)
    except (OSError, AttributeError) as failure:
        return NumpyKernel(f"{path.name} can't be loaded: {failure}")
    wrong = self_test(kernel)
    return NumpyKernel(f"{path.name} was rejected: {wrong}") if wrong else kernel


def built_extension() -> Path | None:
    """Where the package's build put the compiled kernel; None when it did not."""
    here = Path(__file__).parent
    found = (here / f"_adamw{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in found if path.exists()), None)


def self_test(kernel: Kernel) -> str:
    """Compare a kernel with numpy on a few vectors of every pair of kinds; what differs, or nothing."""
    plain = NumpyKernel("self-test")
    step = Step(scale=0.7, shrink=0.001, rate=-0.03, one_b1=0.1, b2=0.999, one_b2=0.001, eps=1e-9)
    for (taken, given), length in product(product(KINDS, (*KINDS, None)), (1, 67)):
        results = [_trial(each, taken, given, length, step) for each in (kernel, plain)]
        if not all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in zip(*results)):
            return f"gradients in {taken}, parameters in {given}, {length} elements differ from numpy's"
    return ""


def _trial(
    kernel: Kernel, taken: torch.dtype, given: torch.dtype | None, length: int, step: Step
) -> list[torch.Tensor]:
    """Everything a kernel writes; with `given` None the parameter is its own master."""
    ramp = (np.arange(length * 4, dtype=np.float32).reshape(4, length) % 61 - 30) * np.float32(0.0371)
    master, exp_avg, exp_avg_sq, values = (torch.from_numpy(row.copy()) for row in ramp)
    exp_avg_sq.abs_()
    gradient, total = values.to(taken), torch.zeros(length)
    parameter = master if given is None else torch.empty(length, dtype=given)
    kernel.update(master, exp_avg, exp_avg_sq, gradient, parameter, step)
    kernel.add(total, gradient, fresh=True)
    kernel.add(total, gradient, fresh=False)
    return [master, exp_avg, exp_avg_sq, parameter, total, torch.tensor(kernel.squares(gradient), dtype=torch.float64)]


def _kind(vector: torch.Tensor) -> int:
    if vector.dtype not in KINDS:
        raise ShapeError("dtype of a gradient or parameter", got=vector.dtype, allowed=list(KINDS),
                         remedy="keep parameters in float32, bfloat16 or float16")  # fmt: skip
    return KINDS[vector.dtype]


def _array(vector: torch.Tensor) -> np.ndarray:
    """The vector's memory as numpy sees it: float32, or the bits of a 16-bit float."""
    vector = vector.detach()
    return vector.numpy() if vector.dtype == torch.float32 else vector.view(torch.int16).numpy().view(np.uint16)


def _tiles(length: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


@np.errstate(all="ignore")
def _update_tile(p: np.ndarray, m: np.ndarray, v: np.ndarray, x: np.ndarray, constants: list[np.float32]) -> np.ndarray:
    scale, shrink, rate, one_b1, b2, one_b2, eps = constants
    x = x * scale
    m += one_b1 * (x - m)
    v *= b2
    v += (one_b2 * x) * x
    p += (rate * m) / (np.sqrt(v) + eps) - shrink * p
    return p


def _load(array: np.ndarray, kind: int) -> np.ndarray:
    if kind == 0:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32) if kind == 1 else array.view(np.float16).astype(np.float32)


@np.errstate(all="ignore")
def _store(values: np.ndarray, kind: int) -> np.ndarray:
    if kind == 0:
        return values
    bits = values.view(np.uint32)
    if kind == 1:
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    halves = values.astype(np.float16).view(np.uint16)
    signs = (bits >> 16).astype(np.uint16) & np.uint16(0x8000)
    return np.where(np.isnan(values), signs | np.uint16(0x7E00), halves)


def _squares(values: np.ndarray) -> float:
    padded = np.zeros(-(-values.size // LANES) * LANES)
    padded[: values.size] = values
    with np.errstate(all="ignore"):
        # Summing over the first axis adds row by row, which is the kernel's order.
        lanes = np.add.reduce(np.square(padded).reshape(-1, LANES), axis=0, initial=0.0)
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])
