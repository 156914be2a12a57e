"""How exact: the 16 subsets and 300 steps, as numbers beside the plain program's own distance from float64.

    python -m benchmarks.numerics --measure float32      # the 16 subsets of the demo's model on two ranks: one row
    python -m benchmarks.numerics                        # docs/numerics.md from the newest rows

`benchmarks/curves.py` gives the rows of the 300 steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.run import keep, latest
from steppe.subsets import all_subsets, certificates, markdown
from steppe.training import config as configs
from steppe.training.ranks import Place, on_this_rank, start_ranks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "numerics.md"
TOKENS, STEPS = 256, 3
_HEAD = """# Numerics: how far from the plain program, how far from the truth

Written by `benchmarks/numerics.py` from the newest rows of `benchmarks/curves.py` and its own.

A flattener changes the order of sums, nothing else. Such a difference says little alone: the plain program, too, is
only near the real-number result, and its own distance from float64 is the measure.
"""
_SUBSETS = """Losses are those of tokens over all steps; a gradient error is the largest over parameters of
||difference|| / ||truth||, of the first step.
"""
_CURVES = """
## 300 steps

![loss curves](curves.png)

One seed, one order of rows, one schedule; each arm trains by itself, so that every difference also grows with the
weights that it has changed. Training amplifies: two programs that differ in one rounding drift apart, and the question
is whether the flattened one drifts any further from the float64 run than the plain one does. Gradients are compared as
||difference|| / ||gradient|| over all parameters together, norms as ratios less one, each at its largest.
"""


def measure(dtype: str) -> int:
    """The row of one dtype, taken on two ranks."""
    place = Place.of(os.environ)
    if place is None:
        start_ranks(sys.argv[1:], 2, module="benchmarks.numerics")
        return 0

    def inside(device: Any) -> int:
        config = configs.load(ROOT / "examples" / "demo.toml").replace("data", seq_len=TOKENS)
        config = config.replace("train", dtype=dtype).replace("output", dir=str(ROOT / "build" / "numerics"))
        found = certificates(config, all_subsets(), steps=STEPS, device=device, say=lambda line: None)
        if place.rank == 0:
            label = f"{dtype}: the demo's model, {TOKENS} tokens a rank, two ranks (E_p 2, P 2), {STEPS} steps"
            keep("numerics", {"label": label, "subsets": {n: _figures(c.to_json()) for n, c in found.items()}})
        return 0

    return on_this_rank(inside, place, 300.0)


def _figures(certificate: dict[str, Any]) -> dict[str, Any]:
    """What the tables show; policies, signals and who holds the peak are the certificate's own business."""
    sides = ("plain", "flattened")
    shown = ("device_peak_bytes", "peaks", "host_bytes")
    kept = {key: value for key, value in certificate.items() if key not in (*sides, "signals", "flatteners")}
    return kept | {side: {key: certificate[side][key] for key in shown} for side in sides}


def page() -> str:
    """docs/numerics.md as text."""
    lines = [_HEAD]
    for row in latest("numerics"):
        lines += [f"## {row['label']}\n", _SUBSETS, markdown(row["subsets"]), f"\n{_source(row)}\n"]
    for row in latest("curves"):
        lines += [_CURVES, *_curves(row), f"\n{row['label']}. {_source(row)}"]
    return "\n".join(lines) + "\n"


def _curves(row: dict[str, Any]) -> Iterator[str]:
    cells = ("largest loss difference", "mean loss difference", "largest loss difference of a token", "per-token MSE",
             "gradient norm difference")  # fmt: skip
    steps = [*row["float32"]["flattened against plain"]["gradient relative error"]]
    yield f"| dtype | pair | steps | {' | '.join(cells)} | {' | '.join(f'gradients, step {s}' for s in steps)} |"
    yield "|" + " --- |" * (3 + len(cells) + len(steps))
    for dtype in ("float32", "bfloat16"):
        for pair in ("flattened against plain", "plain against float64", "flattened against float64"):
            found = row[dtype][pair]
            gradients = [found["gradient relative error"].get(step) for step in steps]
            values = [found[cell] for cell in cells] + gradients
            told = ["" if value is None else f"{value:.2g}" for value in values]
            yield f"| {dtype} | {pair} | {found['steps']} | {' | '.join(told)} |"
    yield ""
    first, last = row["float64"]["first and last loss"]
    ends = {
        f"{d} {s}": row[d]["first and last loss"][s] for d in ("float32", "bfloat16") for s in ("plain", "flattened")
    }
    told = ", ".join(f"{name} {end:.5f}" for name, (_, end) in ends.items())
    known = row["float32"]["plain against float64"]["steps"]
    yield f"Loss: {first:.5f} at step 1 in float64, {last:.5f} at step {known}; at the last step {told}."


def _source(row: dict[str, Any]) -> str:
    return f"Row of {row['date']}, commit {row['commit']}, torch {row['torch']}, {row['machine']}."


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how exact the subsets are, or write docs/numerics.md.")
    parser.add_argument("--measure", choices=("float32", "bfloat16"), help="take the row of this type of products")
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
