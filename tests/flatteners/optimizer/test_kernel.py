"""The compiled kernel and numpy give the same bits; no contraction, no flushing, no silent absence."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.flatteners.optimizer import kernel
from steppe.flatteners.optimizer.kernel import CompiledKernel, NumpyKernel, built_extension, load_kernel, self_test
from steppe.flatteners.optimizer.rates import kernel_seconds
from steppe.flatteners.optimizer.schedule import SQUARE_BLOCK, Step, fold
from steppe.runtime import machine
from tests.support.exactness import assert_bitwise

from .programs import DTYPES

HAS_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
PLAIN = NumpyKernel("the judge")
needs_extension = pytest.mark.skipif(built_extension() is None, reason="the compiled kernel was not built")


def test_where_a_compiler_is_the_extension_was_built_from_the_present_source() -> None:
    path = built_extension()
    assert path is not None or not HAS_COMPILER, "a compiler is there, but the kernel was not built: reinstall steppe"
    if path is not None:
        source = Path(kernel.__file__).with_name("adamw.c")
        assert path.stat().st_mtime >= source.stat().st_mtime, "adamw.c is newer than its build: reinstall steppe"


def test_the_compiled_kernel_runs_where_it_was_built() -> None:
    assert load_kernel().name.startswith("compiled" if built_extension() else "numpy")


def test_the_self_test_rejects_a_kernel_that_differs_in_one_bit() -> None:
    class Wrong(NumpyKernel):
        def update(self, *args: torch.Tensor, step: Step | None = None) -> None:  # type: ignore[override]
            super().update(*args)
            args[0].view(torch.int32)[-1] ^= 1

    assert self_test(PLAIN) == ""
    assert "differ from numpy's" in self_test(Wrong("off by one bit"))


def _vectors(taken: torch.dtype, given: torch.dtype, length: int, seed: int, offset: int = 0) -> list[torch.Tensor]:
    numbers = np.random.default_rng(seed)
    wide = numbers.standard_normal((4, length)) * 10.0 ** numbers.integers(-12, 6, (4, length))
    master, exp_avg, exp_avg_sq, gradient = (torch.from_numpy(row.astype(np.float32)) for row in wide)
    out = torch.empty(length + offset, dtype=given)[offset:]
    return [master, exp_avg, exp_avg_sq.abs(), gradient.to(taken), out]


@needs_extension
@pytest.mark.parametrize(("taken", "given"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000, 4099])
def test_the_compiled_update_has_numpys_bits(taken: torch.dtype, given: torch.dtype, length: int) -> None:
    path = built_extension()
    assert path is not None
    for t, offset in ((1, 0), (7, 1), (1000, 8)):
        step = fold(3e-4, (0.9, 0.999), 1e-8, 0.1, t, scale=0.37, maximize=t == 7)
        ours, theirs = (_vectors(taken, given, length, t, offset) for _ in range(2))
        CompiledKernel(path).update(*ours, step)
        PLAIN.update(*theirs, step)
        for name, mine, other in zip(("master", "exp_avg", "exp_avg_sq", "gradient", "parameter"), ours, theirs):
            assert_bitwise(mine, other, f"{name} at step {t}, offset {offset}")


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, SQUARE_BLOCK - 1, SQUARE_BLOCK + 17])
def test_the_compiled_sums_have_numpys_bits(dtype: torch.dtype, length: int) -> None:
    path = built_extension()
    assert path is not None
    compiled = CompiledKernel(path)
    gradient = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    assert compiled.squares(gradient) == PLAIN.squares(gradient)
    ours, theirs = torch.full((length,), torch.nan), torch.full((length,), torch.nan)
    for fresh in (True, False):
        compiled.add(ours, gradient, fresh=fresh)
        PLAIN.add(theirs, gradient, fresh=fresh)
    assert_bitwise(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_values_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for each in _kernels():
        total = torch.empty(2**16)
        each.add(total, every, fresh=True)
        finite = ~every.isnan()
        assert_bitwise(total[finite], every.float()[finite], each.name)
        assert total[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_outputs_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    exact = every.float()[every.isfinite()].sort().values
    between = (exact[1:].double() + exact[:-1].double()).div(2).float()  # all midpoints: ties to even
    near = torch.cat([exact, between, between.nextafter(torch.tensor(torch.inf)), between.nextafter(-exact[-1:] * 4)])
    values = torch.cat([near, torch.tensor([65519.99, 65520.0, 3.4e38, 1e-45, -1e-40])])
    keep = Step(scale=1.0, shrink=0.0, rate=0.0, one_b1=0.0, b2=0.0, one_b2=0.0, eps=1.0)
    zeros = torch.zeros_like(values)
    for each in _kernels():
        out = torch.empty(values.numel(), dtype=dtype)
        each.update(values.clone(), zeros.clone(), zeros.clone(), zeros, out, keep)
        # A sum with zero turns -0 into +0 and torch's cast of NaN has another payload: neither is compared.
        assert_bitwise(out + 0, values.to(dtype) + 0, each.name)


def test_nan_and_infinite_gradients_stay_visible() -> None:
    step = fold(1e-3, (0.9, 0.999), 1e-8, 0.0, 1)
    for each, dtype in itertools.product(_kernels(), DTYPES):
        gradient = torch.tensor([torch.nan, torch.inf, 1.0] * 40).to(dtype)
        master, exp_avg, exp_avg_sq, out = (
            torch.ones(120),
            torch.zeros(120),
            torch.zeros(120),
            torch.ones(120, dtype=dtype),
        )
        each.update(master, exp_avg, exp_avg_sq, gradient, out, step)
        assert master.isnan().tolist() == [True, True, False] * 40
        assert out.isnan().tolist() == [True, True, False] * 40


def test_subnormal_moments_are_not_flushed() -> None:
    step = Step(scale=1.0, shrink=0.0, rate=0.0, one_b1=0.1, b2=0.5, one_b2=0.0, eps=1.0)
    for each in _kernels():
        exp_avg, zeros = torch.full((70,), 1e-39), torch.zeros(70)
        each.update(zeros.clone(), exp_avg, torch.full((70,), 1e-39), zeros, torch.empty(70), step)
        assert (exp_avg > 8e-40).all()


@needs_extension
def test_loading_the_kernel_leaves_the_threads_floating_point_mode_alone() -> None:
    # A linker given -ffast-math adds a start-up routine that flushes subnormals in the loading thread.
    program = (
        "import ctypes, numpy as np\n"
        f"ctypes.CDLL({str(built_extension())!r})\n"
        "assert np.float32(1e-40) * np.float32(1) != 0, 'subnormals are flushed'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@needs_extension
@pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils are not installed")
def test_the_build_holds_no_fused_multiply_add() -> None:
    code = subprocess.run(["objdump", "-d", str(built_extension())], capture_output=True, text=True, check=True).stdout
    assert "vmulps" in code or "fmul" in code
    assert not re.findall(r"\bvfn?m(?:add|sub)\w+|\bfmadd\b|\bfmla\b", code)


@needs_extension
@given(st.integers(0, 300), st.integers(0, 2**31), st.sampled_from(DTYPES), st.integers(1, 5000))
def test_any_vector_has_numpys_bits(length: int, seed: int, dtype: torch.dtype, t: int) -> None:
    path = built_extension()
    assert path is not None
    step = fold(1e-3, (0.8, 0.95), 1e-6, 0.01, t)
    ours, theirs = (_vectors(dtype, dtype, length, seed) for _ in range(2))
    CompiledKernel(path).update(*ours, step)
    PLAIN.update(*theirs, step)
    for mine, other in zip(ours, theirs):
        assert_bitwise(mine, other)


def test_calibration_times_the_kernel_that_runs() -> None:
    measured = machine.adamw_rate(1, 0.05, kernel_seconds, count=2**16)
    assert measured > 0
    assert kernel_seconds(1000, 2) > 0


def _kernels() -> list[kernel.Kernel]:
    return [PLAIN, load_kernel()]
