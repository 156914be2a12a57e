"""`with steppe.profile(model, optimizer) as report:` around any step, and what it answers afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from steppe.core.errors import SteppeError
from steppe.core.ledger import Ledger
from steppe.profiler import reading
from steppe.profiler.drawing import picture
from steppe.runtime.attribution import attribute
from steppe.runtime.meter import Meter
from steppe.runtime.timeline import Timeline


@contextmanager
def profile(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    ceiling_bytes: int | None = None,
    device_type: str | None = None,
) -> Iterator[Report]:
    """Measure who holds the memory of what runs inside: one training step, or several.

    The model is attributed for the duration and comes out as it was. `ceiling_bytes` is the device memory to judge
    by. The first step makes the optimizer's states, so the third is the one to look at.

    Peak: none on the device. Exactness: bitwise. Slower meanwhile: docs/profiling.md.
    """
    report = Report(ceiling_bytes)
    handle = attribute(model)
    meter = Meter(model, optimizer, device_type=device_type)
    try:
        with meter:
            report.meter = meter
            yield report
    finally:
        handle.remove()
        report._take(meter, handle.found)


class Report:
    """What a profiled stretch held. Read it after the `with` block."""

    def __init__(self, ceiling_bytes: int | None = None) -> None:
        self.ceiling_bytes = ceiling_bytes
        self.recognised: dict[str, list[str]] = {}
        self.meter: Meter | None = None  # while the block runs
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
        return reading.advice(self.ledger, self.timeline, self.ceiling_bytes, on)

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

    def _take(self, meter: Meter, recognised: dict[str, list[str]]) -> None:
        self.meter = None
        self.recognised = recognised
        self._ledger, self._timeline = meter.ledger(), meter.timeline()
