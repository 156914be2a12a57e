"""Every example runs as its first line says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAS_TRAINER = importlib.util.find_spec("accelerate") is not None  # transformers' Trainer needs it
ALONE = ("boundaries", "vocabulary", "experts", "optimizer")


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_flattener_runs_alone_in_about_ten_lines_and_all_four_in_a_loop_and_under_the_trainer() -> None:
    # one process for all: most of an example's time is the import of torch and transformers
    names = [*ALONE, "full_loop", *(("hf_trainer",) if HAS_TRAINER else ())]
    said = _run("-c", "import runpy\n" + "\n".join(f"runpy.run_path('examples/{name}.py')" for name in names))
    assert said.count("bytes left the device") == 1 + HAS_TRAINER
    assert said.count("share of the loss") == 3
    assert said.count("step ") == 3 + 3
    for name in ALONE:
        lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
        code = [line for line in lines[1:] if line.strip() and not line.startswith(("import", "from", "print"))]
        assert len(code) <= 10, f"examples/{name}.py has {len(code)} lines of code"


def test_all_four_run_in_a_loop_of_ones_own_on_two_ranks() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert _run(*launcher, "examples/full_loop.py").count("share of the loss") == 3 * 2
