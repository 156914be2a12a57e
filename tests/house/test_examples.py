"""Every example runs as its first line says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = ("boundaries", "vocabulary", "experts", "optimizer")


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_flattener_runs_alone_in_about_ten_lines() -> None:
    # one process for all: most of an example's time is the import of torch
    said = _run("-c", "import runpy\n" + "\n".join(f"runpy.run_path('examples/{name}.py')" for name in ALONE))
    assert "bytes left the device" in said
    assert said.count("step ") == 3
    for name in ALONE:
        lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
        code = [line for line in lines[1:] if line.strip() and not line.startswith(("import", "from", "print"))]
        assert len(code) <= 10, f"examples/{name}.py has {len(code)} lines of code"


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_four_run_in_a_loop_of_ones_own(ranks: int) -> None:
    launcher = () if ranks == 1 else ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    assert _run(*launcher, "examples/full_loop.py").count("share of the loss") == 3 * ranks


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_the_trainer_of_transformers_runs_with_both() -> None:
    assert "bytes left the device" in _run("examples/hf_trainer.py")
