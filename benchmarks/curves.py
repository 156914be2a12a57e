"""300 steps of the demo's model: plain and flattened from one seed, float32 and bfloat16, beside the float64 program.

    python -m benchmarks.curves                  # one piece: some minutes of the next arm, then stops
    python -m benchmarks.curves --report         # when all arms are done: the row, the picture

Each piece resumes where the last one stopped (`build/curves`). Every arm sees the same rows, schedule and clipping. The
row goes to `benchmarks/rows/curves.jsonl`, the picture to `docs/curves.png`; `python -m benchmarks.numerics` writes
`docs/numerics.md` from the row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from steppe.integrations import transformers as hf
from steppe.integrations.float64 import float64_model
from steppe.training import checkpoint
from steppe.training import config as configs
from steppe.training.config import RunConfig
from steppe.training.loop import Trainer
from steppe.training.model import build_model
from steppe.training.optimizer import clip_gradients, gradient_norm, parameter_groups
from steppe.training.schedule import learning_rate

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "curves"
PICTURE = ROOT / "docs" / "curves.png"
STEPS, TOKENS = 300, 256
GRADIENTS_AT = (0, 99, 299)
ARMS = ("float32/plain", "float32/flattened", "bfloat16/plain", "bfloat16/flattened", "float64")


def run_of(arm: str, work: Path = WORK) -> RunConfig:
    """The demo's run at few tokens on one rank; bfloat16 products, float32 weights and state where the arm says so."""
    dtype, _, side = arm.partition("/")
    config = configs.load(ROOT / "examples" / "demo.toml")
    config = config.replace("data", seq_len=TOKENS).replace("launch", ranks=1, expert=1, vocab=1)
    config = config.replace("train", steps=STEPS, warmup=20, dtype="float32" if dtype == "float64" else dtype)
    config = config.replace("output", dir=str(work / arm), keep=1)
    return config if side == "flattened" else config.plain()


class Record:
    """What an arm has shown so far: loss, norm and every token's loss a step; whole gradients of some steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file = folder, folder / "record.npz"
        folder.mkdir(parents=True, exist_ok=True)
        found = np.load(self._file) if self._file.exists() else {"loss": [], "norm": [], "tokens": []}
        self.values = {key: list(found[key]) for key in ("loss", "norm", "tokens")}

    def __len__(self) -> int:
        return len(self.values["loss"])

    def cut(self, steps: int) -> None:
        self.values = {key: value[:steps] for key, value in self.values.items()}

    def add(self, loss: float, norm: float, tokens: torch.Tensor) -> None:
        for key, value in zip(self.values, (loss, norm, tokens.double().reshape(-1).numpy())):
            self.values[key].append(value)

    def keep_gradients(self, step: int, model: torch.nn.Module) -> None:
        if step in GRADIENTS_AT:
            own = {
                n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().double() for n, p in model.named_parameters()
            }
            torch.save({name: g.clone() for name, g in own.items()}, self.folder / f"gradients-{step}.pt")

    def write(self) -> None:
        np.savez(self._file.with_suffix(".tmp.npz"), **{k: np.asarray(v) for k, v in self.values.items()})
        self._file.with_suffix(".tmp.npz").rename(self._file)


def trained(arm: str, record: Record, in_time: Callable[[], bool]) -> None:
    """A piece of an arm that the Trainer runs."""
    trainer, root = Trainer(run_of(arm), cache=WORK / "data"), record.folder / "checkpoints"
    if found := checkpoint.committed(root):
        checkpoint.load(trainer, found[-1])
    record.cut(trainer.next_step)
    trainer.before_update = lambda: record.keep_gradients(trainer.next_step, trainer.model)
    while trainer.next_step < STEPS and in_time():
        result = trainer.step(keep_token_losses=True)
        record.add(result.loss, result.grad_norm, result.token_losses[0])
    checkpoint.save(trainer, root, keep=1)
    record.write()
    trainer.flattened.detach()


def exact(arm: str, record: Record, in_time: Callable[[], bool]) -> None:
    """A piece of the float64 program: same weights at the start, same rows, schedule, clipping and decay."""
    config = run_of(arm)
    trainer = Trainer(config, cache=WORK / "data")
    model: Any = float64_model(
        trainer.model_config, dict(build_model(config, trainer.model_config).state_dict())
    ).train()
    hf.PlainLoss(model)
    train = config.train
    groups = parameter_groups(model, train.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    state = record.folder / "state.pt"
    if state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        record.cut(saved["steps"])
    while len(record) < STEPS and in_time():
        step = len(record)
        batch = trainer.data.batches(step)[0]
        part = hf.loss_of(
            model, batch.input_ids, batch.position_ids, batch.labels, num_valid=batch.num_valid, share=1.0,
            keep_tokens=True,
        )  # fmt: skip
        part.total.backward()
        record.keep_gradients(step, model)
        parameters = list(model.parameters())
        norm = gradient_norm(parameters, None)
        clip_gradients(parameters, norm, train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        optimizer.zero_grad()
        assert part.tokens is not None
        record.add(part.cross_entropy.item(), norm.item(), part.tokens)
    record.write()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": len(record)}, state)


def report() -> dict[str, Any]:
    """The row: each pair's differences over all steps, next to each program's own distance from float64."""
    records = {arm: Record(WORK / arm) for arm in ARMS}
    row: dict[str, Any] = {"label": f"{STEPS} steps of the demo's model, {TOKENS} tokens a step, one rank"}
    for dtype in ("float32", "bfloat16"):
        plain, flattened = f"{dtype}/plain", f"{dtype}/flattened"
        pairs = {"flattened against plain": (flattened, plain), "plain against float64": (plain, "float64"),
                 "flattened against float64": (flattened, "float64")}  # fmt: skip
        row[dtype] = {name: _difference(records[a], records[b]) for name, (a, b) in pairs.items()}
        row[dtype]["first and last loss"] = {
            side: [records[f"{dtype}/{side}"].values["loss"][i] for i in (0, -1)] for side in ("plain", "flattened")
        }
    row["float64"] = {"first and last loss": [records["float64"].values["loss"][i] for i in (0, -1)]}
    draw({arm: record.values["loss"] for arm, record in records.items()})
    return row


def _difference(ours: Record, theirs: Record) -> dict[str, Any]:
    steps = min(len(ours), len(theirs))
    a, b = ({key: np.asarray(value[:steps]) for key, value in record.values.items()} for record in (ours, theirs))
    losses, tokens, norms = np.abs(a["loss"] - b["loss"]), a["tokens"] - b["tokens"], np.abs(a["norm"] / b["norm"] - 1)
    return {
        "steps": steps,
        "largest loss difference": losses.max(), "mean loss difference": losses.mean(),
        "at step": int(losses.argmax()) + 1,
        "largest loss difference of a token": np.abs(tokens).max(), "per-token MSE": np.square(tokens).mean(),
        "gradient norm difference": norms.max(),
        "gradient relative error": {str(s + 1): _gradient_error(ours, theirs, s) for s in GRADIENTS_AT if s < steps},
    }  # fmt: skip


def _gradient_error(ours: Record, theirs: Record, step: int) -> float:
    """||ours - theirs|| / ||theirs|| over all parameters together."""
    mine, other = (torch.load(record.folder / f"gradients-{step}.pt") for record in (ours, theirs))
    squares = [((mine[n] - g).square().sum().item(), g.square().sum().item()) for n, g in other.items()]
    return float((sum(d for d, _ in squares) / sum(s for _, s in squares)) ** 0.5)


def draw(losses: dict[str, list[float]]) -> None:
    """The curves side by side, and below them each arm's distance from float64."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 6), sharex=True, height_ratios=(2, 1))
    truth = np.asarray(losses["float64"])
    for column, dtype in enumerate(("float32", "bfloat16")):
        top, bottom = axes[0][column], axes[1][column]
        for side, style in (("plain", "-"), ("flattened", "--")):
            curve = np.asarray(losses[f"{dtype}/{side}"])
            top.plot(np.arange(1, len(curve) + 1), curve, style, label=side, linewidth=1.2)
            away = np.abs(curve[: len(truth)] - truth) + 1e-12
            bottom.semilogy(np.arange(1, len(truth) + 1), away, style, label=side, linewidth=0.8)
        top.set_title(f"{dtype}: loss")
        bottom.set_title("distance from the float64 program")
        bottom.set_xlabel("step")
        top.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo's model for 300 steps in all arms, piece by piece.")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long a piece may take (%(default)s)")
    parser.add_argument("--arm", choices=ARMS, help="a piece of this arm (default: of the first unfinished one)")
    parser.add_argument("--report", action="store_true", help="write the row and the picture of finished arms")
    args = parser.parse_args()
    left = [arm for arm in ARMS if len(Record(WORK / arm)) < STEPS and args.arm in (None, arm)]
    if args.report:
        if [arm for arm in left if arm != "float64" or len(Record(WORK / arm)) <= GRADIENTS_AT[1]]:
            parser.error(f"not finished: {', '.join(left)}")
        from benchmarks.run import keep

        keep("curves", json.loads(json.dumps(report(), default=float)))
        return 0
    if not left:
        return 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    until, record = time.monotonic() + args.seconds, Record(WORK / left[0])
    (exact if left[0] == "float64" else trained)(left[0], record, lambda: time.monotonic() < until)
    print(f"{left[0]}: {len(record)} of {STEPS} steps", file=sys.stderr)
    return 3 if len(left) > 1 or len(record) < STEPS else 0


if __name__ == "__main__":
    sys.exit(main())
