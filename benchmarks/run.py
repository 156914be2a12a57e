"""The one runner: `python -m benchmarks.run optimizer vocab` runs cases, appends their rows and prints them.

A case is a module `case_<name>.py` with `TESTS` (its tests; a case refuses to print a speed while they are red) and
`rows(quick)`, which yields dictionaries, and `gpu_rows()` where it has rows for a GPU. Rows go to
`benchmarks/rows/<name>.jsonl` with date, commit and machine.
`python -m benchmarks.tables` writes the newest rows into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROWS = HERE / "rows"


def main() -> int:
    names = sorted(path.stem.removeprefix("case_") for path in HERE.glob("case_*.py"))
    parser = argparse.ArgumentParser(description="Run benchmark cases and append their rows.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few rounds and small shapes; rows are not kept")
    parser.add_argument("--skip-tests", action="store_true", help="with --quick only: don't run the case's tests first")
    parser.add_argument(
        "--gpu", action="store_true", help="the case's gpu rows instead; its gpu tests have to be green"
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="the folder of the JSON lines (%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(names):
        parser.error(f"unknown cases {sorted(unknown)}; there are {names}")
    if args.skip_tests and not args.quick:
        parser.error("--skip-tests needs --quick: no row is kept without green tests")
    for name in args.cases or names:
        case = importlib.import_module(f"benchmarks.case_{name}")
        if not args.skip_tests and not _tests_are_green(case.TESTS, "gpu" if args.gpu else "not slow"):
            print(f"{name}: its tests ({case.TESTS}) are red, so no speed is reported", file=sys.stderr)
            return 1
        if args.gpu and not hasattr(case, "gpu_rows"):
            print(f"{name}: no gpu rows", file=sys.stderr)
            continue
        for row in case.gpu_rows() if args.gpu else case.rows(args.quick):
            keep(name, row, folder=None if args.quick else args.rows)
    return 0


def keep(name: str, row: dict[str, Any], *, folder: Path | None = ROWS) -> None:
    """Print a row, and append it to the case's JSON lines in `folder`."""
    print(json.dumps(row), flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps({**row, **stamp()}) + "\n")


def latest(name: str) -> Iterator[dict[str, Any]]:
    """The newest row of every label of a case."""
    path, rows = ROWS / f"{name}.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        rows[row.get("label", "")] = row
    yield from rows.values()


def stamp() -> dict[str, Any]:
    """Date, commit and machine of a row."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=HERE)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() + ("+" if dirty.stdout.strip() else ""),
        "machine": _machine(),
        "torch": torch.__version__,
    }


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}"
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = lines[0] if lines else model
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def _tests_are_green(tests: str, marker: str) -> bool:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", marker, *tests.split()], cwd=HERE.parent)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
