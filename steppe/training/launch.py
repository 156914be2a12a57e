"""`steppe train`: under torchrun one rank of a run, by itself the launcher of its ranks."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from steppe.core.errors import CheckpointError, ConfigError, SteppeError
from steppe.runtime import collectives
from steppe.training import checkpoint
from steppe.training import config as configs
from steppe.training.config import RunConfig
from steppe.training.export import export as export_model
from steppe.training.joblock import JobLock, Parent
from steppe.training.loop import Trainer
from steppe.training.metrics import MetricsLog, record
from steppe.training.progress import Progress


class JobFailed(SteppeError, RuntimeError):
    """A rank failed; the message is that rank's own."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as torchrun says in the environment."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Raises: ConfigError for an environment that is half torchrun's."""
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        except (KeyError, ValueError) as failure:
            raise ConfigError(
                "torchrun's environment", got=f"{failure}", allowed="whole numbers in RANK and WORLD_SIZE",
                remedy="start through torchrun, or unset RANK and use --ranks",
            ) from failure  # fmt: skip
        local_rank = int(environment.get("LOCAL_RANK", rank))
        return cls(rank, world, local_rank, int(environment.get("LOCAL_WORLD_SIZE", world)))


def train(
    path: str | Path, ranks: int | None = None, *, export: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Train as a run.toml says, resuming from the newest checkpoint in its output directory. Returns the exit code.

    With RANK in the `environment` (torchrun) this process is one rank; else it starts `ranks` (default: launch.ranks).
    Raises: ConfigError, DataError, CheckpointError, WorkingSetError; JobFailed with a failed rank's message.
    """
    config = configs.load(path)
    if environment and "RANK" in environment:
        return run_recorded(config, Place.of(environment), export)
    start_ranks(config, Path(path), ranks or config.launch.ranks, export)
    return 0


def start_ranks(config: RunConfig, path: Path, ranks: int, export: str | Path | None = None) -> None:
    """Start the ranks on this machine through torch's elastic agent and wait for them.

    One rank's failure ends all. Raises: ConfigError for ranks that don't divide; JobFailed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if ranks < 1:
        raise ConfigError("ranks", got=ranks, allowed="1 or more", remedy="--ranks 1")
    config.launch.mesh(ranks)
    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=f"steppe-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, local_addr="localhost",
    )  # fmt: skip
    arguments = ["-m", "steppe.training.worker", str(path), *([str(export)] if export else [])]
    try:
        elastic_launch(settings, sys.executable)(*arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        raise JobFailed(f"rank {rank} (process {first.pid}): {first.message}") from None


def run_recorded(config: RunConfig, place: Place, export: str | Path | None = None) -> int:
    """`run_rank` whose failure reaches the launcher through torch's error file."""
    from torch.distributed.elastic.multiprocessing.errors import record as recorded

    return recorded(run_rank)(config, place, export) or 0


def run_rank(config: RunConfig, place: Place, export: str | Path | None = None) -> int:
    """One rank of the job from start to end."""
    parent = Parent()
    with _process_group(config, place) as device:
        output, group = Path(config.output.dir), collectives.world()
        lock = JobLock(output, group, config.output.lock_timeout_s)
        try:
            progress = Progress(shown=place.rank == 0, steps=config.train.steps)
            progress.say(f"preparing text and model on {place.world} ranks ({output})")
            trainer = Trainer(config, group, device=device)
            run(trainer, output, progress, parent)
            if export or config.output.export:
                progress.say("exporting safetensors")
                target = Path(export) if export else output / "export"
                export_model(trainer.model, target, group, tokenizer_file=trainer.store.tokenizer_file)
        finally:
            lock.release()
    return 0


def run(trainer: Trainer, output: Path, progress: Progress, parent: Parent | None = None) -> None:
    """All remaining steps of a run: resume, step, write metrics, commit checkpoints."""
    config, root = trainer.config, output / "checkpoints"
    resumed = resume(trainer, root)
    if resumed is not None:
        progress.say(f"resumed from {resumed.name}")
    log = MetricsLog(output / "metrics.jsonl") if trainer.rank == 0 else None
    if log is not None:
        log.resume(trainer.next_step)
    with progress.bar(trainer.next_step):
        while trainer.next_step < config.train.steps:
            if parent is not None:
                parent.check()
            result = trainer.step()
            if log is not None:
                log.write(record(result, trainer.device))
            progress.step(result)
            if _is_due(trainer.next_step, config):
                if log is not None:
                    log.sync()
                checkpoint.save(trainer, root, keep=config.output.keep)
    if log is not None:
        log.close()


def resume(trainer: Trainer, root: Path) -> Path | None:
    """Load what output.resume asks for; None for a fresh start. Raises: CheckpointError."""
    wanted, found = trainer.config.output.resume, checkpoint.committed(root)
    if wanted == "never" or (wanted == "latest" and not found):
        if wanted == "never" and found:
            raise CheckpointError(
                f"checkpoints in {root}", got=found[-1].name, allowed='none with output.resume = "never"',
                remedy="choose another output.dir, or set output.resume = \"latest\"",
            )  # fmt: skip
        return None
    chosen = found[-1] if wanted == "latest" else root / wanted
    if chosen not in found:
        raise CheckpointError(
            "output.resume", got=wanted, allowed=", ".join(p.name for p in found) or "nothing is saved yet",
            remedy="name one of these, or \"latest\"",
        )  # fmt: skip
    manifest = checkpoint.load(trainer, chosen)
    checkpoint.on_rank_zero(lambda: checkpoint.set_aside(root, manifest.step), trainer.group)
    return chosen


def _is_due(done: int, config: RunConfig) -> bool:
    every = config.output.checkpoint_every
    return done == config.train.steps or (every > 0 and done % every == 0)


@contextmanager
def _process_group(config: RunConfig, place: Place) -> Iterator[torch.device]:
    """The ranks' process group (torchrun's rendezvous) and this rank's device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    timeout = datetime.timedelta(seconds=config.launch.timeout_s)
    if accelerator is None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world))
        device, backend = torch.device("cpu"), "gloo"
    else:
        torch.accelerator.set_device_index(place.local_rank)
        device, backend = torch.device(accelerator.type, place.local_rank), None
    dist.init_process_group(backend, rank=place.rank, world_size=place.world, timeout=timeout)
    try:
        yield device
    finally:
        if sys.exc_info()[0] is None:
            dist.barrier()
        dist.destroy_process_group()


def wait_for(condition: Path, timeout_s: float) -> bool:
    """Whether a file appears in time; for scripts that follow a run."""
    until = time.monotonic() + timeout_s
    while not condition.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
