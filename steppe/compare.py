"""One flattener on and off in alternation: does it pay here?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF
from steppe.flatteners import NAMES
from steppe.runtime import collectives
from steppe.training.config import RunConfig, policy_class
from steppe.training.loop import Trainer


@dataclass(frozen=True)
class Comparison:
    """Time of a step with a flattener on over off: median, lowest and highest of the rounds' ratios."""

    toggle: str
    rounds: int
    ratio: float
    lowest: float
    highest: float
    on_ms: float
    off_ms: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        verdict = "it costs time here" if self.lowest > 1 else "it saves time here" if self.highest < 1 else "a draw"
        return (
            f"{self.toggle}: {self.ratio:.3f}x the time of a step without it ({self.lowest:.3f} .. {self.highest:.3f} "
            f"over {self.rounds} rounds; {self.on_ms:.0f} ms on, {self.off_ms:.0f} ms off): {verdict}"
        )


def compare(config: RunConfig, toggle: str, *, rounds: int, device: torch.device | None = None) -> Comparison:
    """Alternate two trainers of one run that differ in one flattener; the slowest rank counts in every step.

    Where the run itself has the flattener off, "on" means its default policy. Raises: ConfigError.
    """
    if toggle not in NAMES:
        raise ConfigError("--toggle", got=repr(toggle), allowed=NAMES, remedy="name one of the flatteners")
    if rounds < 1:
        raise ConfigError("--rounds", got=rounds, allowed="1 or more", remedy="use 7 or more for a steady median")
    policy = config.flatten[toggle] if config.flatten[toggle] != OFF else policy_class(toggle)()
    sides = {"on": policy, "off": OFF}
    trainers = {n: Trainer(config.with_flatten(**{toggle: p}), device=device) for n, p in sides.items()}
    taken: dict[str, list[float]] = {"on": [], "off": []}
    for turn in range(rounds + 1):
        for name in ("on", "off") if turn % 2 else ("off", "on"):
            ms = trainers[name].step().ms
            if turn:  # the first round warms up
                taken[name].append(max(collectives.all_gather_object(ms, trainers[name].group)))
    ratios = [on / off for on, off in zip(taken["on"], taken["off"], strict=True)]
    for trainer in trainers.values():
        trainer.flattened.detach()
    return Comparison(toggle, rounds, median(ratios), min(ratios), max(ratios), *(median(taken[n]) for n in taken))
