"""`steppe train`: under torchrun one rank of a run, by itself the launcher of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from steppe.core.errors import CheckpointError
from steppe.runtime import collectives
from steppe.training import checkpoint
from steppe.training import config as configs
from steppe.training.agreement import on_rank_zero, writing
from steppe.training.config import RunConfig
from steppe.training.evaluation import Evaluation
from steppe.training.export import check_target
from steppe.training.export import export as export_model
from steppe.training.joblock import JobLock, Parent
from steppe.training.loop import Trainer
from steppe.training.metrics import MetricsLog, record
from steppe.training.progress import Progress
from steppe.training.ranks import Place, on_this_rank, start_ranks

_WENT_BACK: Final = ".went-back"  # the checkpoint that output.resume named and that this job has gone back to


def train(
    path: str | Path, ranks: int | None = None, *, export: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Train as a run.toml says, resuming from the newest checkpoint in its output directory. Returns the exit code.

    With RANK in the `environment` (torchrun) this process is one rank; else it starts `ranks` (default: launch.ranks).
    Raises: ConfigError, DataError, CheckpointError, WorkingSetError; JobFailed with a failed rank's message.
    """
    config = configs.load(path)
    place = Place.of(environment or {})
    if place is not None:
        parent = Parent()
        work = partial(run_rank, config, parent=parent, export=export, restarted=place.restarted)
        return on_this_rank(work, place, config.launch.timeout_s)
    flags = ["--export", str(export)] if export else []
    start_ranks(["train", str(path), *flags], config.launch.count(ranks))
    return 0


def run_rank(
    config: RunConfig, device: torch.device, parent: Parent, export: str | Path | None = None, restarted: bool = False
) -> int:
    """One rank of the job from start to end, inside its process group."""
    output, group = Path(config.output.dir), collectives.world()
    progress = Progress(shown=collectives.rank(group) == 0, steps=config.train.steps)
    with writing(output):
        return _run_locked(config, device, parent, export, progress, restarted)


def _run_locked(
    config: RunConfig, device: torch.device, parent: Parent, export: str | Path | None, progress: Progress,
    restarted: bool,
) -> int:  # fmt: skip
    output, group = Path(config.output.dir), collectives.world()
    target = Path(export or output / "export") if export or config.output.export else None
    if target is not None:
        on_rank_zero(lambda: check_target(target), group)
    lock = JobLock(output, group, config.output.lock_timeout_s)
    try:
        progress.say(f"preparing text and model on {collectives.size(group)} ranks, output in {output}")
        trainer = Trainer(config, group, device=device)
        run(trainer, output, progress, parent, restarted=restarted)
        if target is not None:
            progress.say(f"exporting safetensors to {target}")
            export_model(trainer.model, target, group, tokenizer_file=trainer.store.tokenizer_file)
    finally:
        lock.release()
    return 0


def run(
    trainer: Trainer, output: Path, progress: Progress, parent: Parent | None = None, *, restarted: bool = False
) -> None:
    """All remaining steps of a run: resume, step, write metrics, commit checkpoints."""
    config, root = trainer.config, output / "checkpoints"
    resumed = resume(trainer, root, restarted=restarted)
    if resumed is not None:
        progress.say(f"resumed from {resumed.name}")
    evaluation = Evaluation(trainer) if config.data.validation else None
    log = MetricsLog(output / "metrics.jsonl", shown=trainer.rank == 0)
    log.resume(trainer.next_step)
    with progress.bar(trainer.next_step):
        while trainer.next_step < config.train.steps:
            if parent is not None:
                parent.check()
            result = trainer.step()
            told = record(result, trainer.device)
            if evaluation is not None and _is_due(trainer.next_step, config.train.steps, config.train.evaluate_every):
                told["eval_loss"] = evaluation.loss()
                progress.say(f"step {trainer.next_step}: loss on data.validation {told['eval_loss']:.4f}")
            log.write(told)
            progress.step(result)
            if _is_due(trainer.next_step, config.train.steps, config.output.checkpoint_every):
                log.sync()
                checkpoint.save(trainer, root, keep=config.output.keep)
    log.close()


def resume(trainer: Trainer, root: Path, *, restarted: bool = False) -> Path | None:
    """Load what output.resume asks for; None for a fresh start. Raises: CheckpointError.

    `restarted`: the launcher has started this job's ranks again (on one node at least: it counts by node). A job goes
    back to a named checkpoint once, and then on behind what it has written since.
    """
    wanted, found, went_back = trainer.config.output.resume, checkpoint.committed(root), root / _WENT_BACK
    restarted = any(collectives.all_gather_object(restarted, trainer.group))
    if restarted and (wanted == "never" or (went_back.exists() and went_back.read_text() == wanted)):
        wanted = "latest"
    if not restarted:
        on_rank_zero(lambda: went_back.unlink(missing_ok=True), trainer.group)
    if not found and wanted in ("latest", "never"):
        return None
    if wanted == "never":
        raise CheckpointError(
            f"checkpoints in {root}", got=found[-1].name, allowed='none with output.resume = "never"',
            remedy='choose another output.dir, or set output.resume = "latest"',
        )  # fmt: skip
    chosen = found[-1] if wanted == "latest" else root / wanted
    if chosen not in found:
        raise CheckpointError(
            "output.resume", got=wanted, allowed=", ".join(p.name for p in found) or "nothing is saved yet",
            remedy='name one of these, or "latest"',
        )  # fmt: skip
    manifest = checkpoint.load(trainer, chosen)
    on_rank_zero(lambda: _go_back(root, manifest.step, wanted), trainer.group)
    return chosen


def _go_back(root: Path, step: int, wanted: str) -> None:
    """Nothing of later steps stands in the way any more; a restart knows that this has been done."""
    checkpoint.set_aside(root, step)
    if wanted != "latest":
        (root / _WENT_BACK).write_text(wanted)


def _is_due(done: int, steps: int, every: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)
