"""`make demo`: the run of demo.toml, plain and then flattened, from one seed.

Writes into --out: metrics.plain.jsonl and metrics.flattened.jsonl, ledgers.json, certificate.json, memory.png and
a checkpoint; prints the table of peaks, times and differences.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from steppe.core.ledger import Ledger
from steppe.training import config as configs
from steppe.training.ranks import Place, on_this_rank, start_ranks

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small MoE plain and flattened, and compare.")
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, help="default: train.steps of the config")
    args = parser.parse_args()
    place = Place.of(os.environ)
    if place is None:
        config = configs.load(args.config)
        print("steppe: starting 2 ranks (first imports take some seconds)", file=sys.stderr, flush=True)
        start_ranks(sys.argv[1:], config.launch.ranks, module="examples.demo")
        return 0
    return on_this_rank(lambda device: demo(args, device), place, 300.0)


def demo(args: argparse.Namespace, device: Any) -> int:
    """One rank of the demo."""
    from steppe.profiler import picture
    from steppe.runtime import collectives
    from steppe.training import checkpoint
    from steppe.verify import side_by_side, table

    config = configs.load(args.config).replace("output", dir=str(args.out.resolve()))
    first = collectives.rank(collectives.world()) == 0

    def say(line: str) -> None:
        if first:
            print(f"steppe: {line}", file=sys.stderr, flush=True)

    def save(trainer: Any) -> None:
        say("saving a checkpoint")
        checkpoint.save(trainer, args.out / "checkpoints", keep=1)

    pair = side_by_side(config, steps=args.steps or config.train.steps, device=device, say=say, after=save)
    if first:
        write(args.out, pair)
        picture(args.out / "memory.png", {name: side.timeline for name, side in pair.sides.items()})
        print(table(pair.certificate))
        print(f"\nwritten: {', '.join(sorted(str(args.out / p.name) for p in args.out.iterdir()))}")
    return 0


def write(out: Path, pair: Any) -> None:
    """Metrics as JSON lines, ledgers and certificate as JSON."""
    ledgers: dict[str, dict[str, Ledger]] = {}
    for name, side in pair.sides.items():
        lines = [json.dumps(metrics(result)) for result in side.results]
        (out / f"metrics.{name}.jsonl").write_text("\n".join(lines) + "\n")
        ledgers[name] = {f"step_{step + 1}": report.ledger.to_json() for step, report in side.reports.items()}
    (out / "ledgers.json").write_text(json.dumps(ledgers, indent=1))
    (out / "certificate.json").write_text(json.dumps(pair.certificate.to_json(), indent=1))


def metrics(result: Any) -> dict[str, Any]:
    kept = ("step", "loss", "aux_loss", "grad_norm", "lr", "num_tokens", "num_valid", "ms")
    return {name: getattr(result, name) for name in kept}


if __name__ == "__main__":
    sys.exit(main())
