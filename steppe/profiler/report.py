"""`with steppe.profile(model, optimizer) as report:` around any step, and what it answers afterwards."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from steppe.core.errors import ConfigError, SteppeError
from steppe.core.ledger import PEAKS, Ledger
from steppe.profiler import reading
from steppe.profiler.drawing import picture
from steppe.runtime.attribution import COMPILED, attribute
from steppe.runtime.meter import Meter
from steppe.runtime.timeline import Timeline


@contextmanager
def profile(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    ceiling_bytes: int | None = None,
    device_type: str | None = None,
) -> Iterator[Report]:
    """Measure who holds the memory of what runs inside: one training step, or several.

    The model is attributed for the duration and comes out as it was. `ceiling_bytes` is the device memory to judge
    by. Several optimizers are given in a list. The first step makes their states, so the third is the one to look at.

    Peak: none on the device. Exactness: bitwise. Slower meanwhile: docs/profiling.md. Raises: ConfigError.
    """
    _check(model, ceiling_bytes, device_type)
    report = Report(ceiling_bytes)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    meter = Meter(model, device_type=device_type)
    handle = attribute(model)
    try:
        with meter:
            for each in optimizers:
                meter.register(optimizer=each)
            report._has_optimizer = optimizers not in ([None], [])
            report.meter = meter
            yield report
    finally:
        handle.remove()
        report._take(meter, handle.found)


def _check(model: object, ceiling_bytes: object, device_type: str | None) -> None:
    """Raises: ConfigError for what can't be measured or judged by."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            "model", got=type(model).__name__, allowed="a torch.nn.Module", remedy="pass the model itself"
        )
    number = isinstance(ceiling_bytes, (int, float)) and 0 < ceiling_bytes < math.inf
    if ceiling_bytes is not None and not number:
        raise ConfigError("ceiling_bytes", got=repr(ceiling_bytes), allowed="bytes above 0",
                          remedy="give a number, as 80 * 2**30")  # fmt: skip
    try:
        torch.device(device_type or "cpu")
    except RuntimeError as error:
        raise ConfigError("device_type", got=repr(device_type), allowed='a device\'s type, as "cuda" or "cpu"',
                          remedy="leave it out for the accelerator, else the CPU") from error  # fmt: skip


class Report:
    """What a profiled stretch held. Read it after the `with` block."""

    def __init__(self, ceiling_bytes: int | None = None) -> None:
        self.ceiling_bytes = ceiling_bytes
        self.recognised: dict[str, list[str]] = {}
        self.meter: Meter | None = None  # while the block runs
        self._has_optimizer = False
        self._ledger: Ledger | None = None
        self._timeline: Timeline | None = None

    def mark(self, name: str) -> None:
        """Name what begins now; the picture shows it."""
        if self.meter is None:
            raise SteppeError("a mark is made inside the profiled block")
        self.meter.mark(name)

    @property
    def ledger(self) -> Ledger:
        """The peak, its holders and the most that each owner held."""
        if self._ledger is None:
            raise SteppeError("the report is read after the profiled block has ended")
        return self._ledger

    @property
    def timeline(self) -> Timeline:
        """Bytes by owner over time."""
        if self._timeline is None:
            raise SteppeError("the report is read after the profiled block has ended")
        return self._timeline

    def table(self) -> str:
        """A table to read: the four peaks and all other owners."""
        return reading.table({"this run": self.ledger})

    def savings(self) -> dict[str, int]:
        """By how many bytes the device peak would fall, at most, were one of the four peaks gone."""
        return reading.savings(self.timeline)

    def advice(self, on: Collection[str] = ()) -> tuple[str, ...]:
        """In sentences: which peak hits the ceiling first, what to switch on and what would save nothing.

        `on` names the flatteners that ran.
        """
        said = reading.advice(self.ledger, self.timeline, self.ceiling_bytes, on, self._unseen())
        return (*said, *self._blind_spots())

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary: ledger, timeline, savings, advice, recognised modules."""
        return {
            "ledger": self.ledger.to_json(),
            "timeline": self.timeline.to_json(),
            "savings": self.savings(),
            "advice": list(self.advice()),
            "recognised": self.recognised,
        }

    def picture(self, path: str | Path, title: str = "") -> None:
        """Draw the stacked timeline as a PNG (or what the name's ending says)."""
        picture(path, {title: self.timeline})

    def _unseen(self) -> list[str]:
        """Peaks that nothing was charged to because nobody was recognised, or given, who makes them."""
        known = {**self.recognised, **({"optimizer": []} if self._has_optimizer else {})}
        return [peak for peak in PEAKS if peak not in known and not self.ledger.peaks.get(peak)]

    def _blind_spots(self) -> Iterator[str]:
        """What stands in other because of how the model was given, in words."""
        if left := self.recognised.get(COMPILED):
            yield (
                f"{len(left)} compiled module(s) were left whole ({left[0] or 'the model itself'}): all that their "
                "insides hold is in other. Profile uncompiled to tell it apart."
            )
        elif "vocab" in self._unseen():
            yield "No output head was recognised: logits and their gradients, if there are any, are in other."

    def _take(self, meter: Meter, recognised: dict[str, list[str]]) -> None:
        self.meter = None
        self.recognised = recognised
        self._ledger, self._timeline = meter.ledger(), meter.timeline()
