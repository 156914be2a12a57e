"""One side of a comparison: a run's trainer, some steps of it, and what they held, took and computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from steppe.core.ledger import Ledger
from steppe.profiler import profile
from steppe.training.config import RunConfig
from steppe.training.loop import StepResult, Trainer

METERED = (0, 2)  # steps 1 and 3, counted from one: the first step and the steady one


@dataclass
class Side:
    """What a number of steps of one program showed on this rank."""

    results: list[StepResult] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, before clipping
    reports: dict[int, Any] = field(default_factory=dict)  # the profiler's, by step
    stats: dict[str, Any] = field(default_factory=dict)
    signals: tuple[str, ...] = ()

    @property
    def ledger(self) -> Ledger:
        """Of the last metered step: the steady peak is the one that counts."""
        ledger: Ledger = self.reports[max(self.reports)].ledger
        return ledger

    @property
    def timeline(self) -> Any:
        return self.reports[max(self.reports)].timeline

    @property
    def step_ms(self) -> float:
        """Median over the steps without the meter."""
        free = [result.ms for step, result in enumerate(self.results) if step not in self.reports]
        return median(free or [result.ms for result in self.results])


def ignore(_: object) -> None:
    """Do nothing with a step's result or a trainer."""


def run_side(
    config: RunConfig,
    *,
    steps: int,
    device: torch.device | None = None,
    on_step: Callable[[StepResult], None] = ignore,
    after: Callable[[Trainer], None] = ignore,
) -> Side:
    """Build the run's trainer, take `steps` steps (METERED ones under the meter), and let it go.

    `after` gets the live trainer at the end (to save a checkpoint, say). Raises what the trainer raises.
    """
    trainer, side = Trainer(config, device=device), Side()
    trainer.before_update = lambda: _keep_gradients(trainer, side)
    for step in range(steps):
        if step in METERED:
            with profile(trainer.model, trainer.optimizer) as report:
                result = trainer.step(keep_token_losses=True)
            side.reports[step] = report
        else:
            result = trainer.step(keep_token_losses=True)
        side.results.append(result)
        trainer.before_update = None
        on_step(result)
    side.stats, side.signals = trainer.flattened.stats(), trainer.flattened.diagnose()
    after(trainer)
    trainer.flattened.detach()
    return side


def _keep_gradients(trainer: Trainer, side: Side) -> None:
    """Copy the (sharded) gradients before anybody clips them."""
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            side.gradients[name] = parameter.grad.detach().clone()
