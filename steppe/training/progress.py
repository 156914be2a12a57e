"""What a person sees of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from steppe.training.loop import StepResult

_LINES: Final = 20  # that a whole run prints where there is no terminal


class Progress:
    """Shown by rank 0, on standard error."""

    def __init__(self, *, shown: bool, steps: int) -> None:
        self._shown, self._steps = shown, steps
        self._bar: Any = None
        self._task: Any = None

    def say(self, line: str) -> None:
        """A line before something that takes time."""
        if self._shown:
            print(f"steppe: {line}", file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, done: int) -> Iterator[None]:
        """The stretch of the run's steps, `done` of which are behind it."""
        if not (self._shown and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        words = TextColumn("{task.fields[words]}")
        columns = ("steppe", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words)
        with Bar(*columns, console=Console(stderr=True)) as self._bar:
            self._task = self._bar.add_task("train", total=self._steps, completed=done, words="")
            yield
        self._bar = None

    def step(self, result: StepResult) -> None:
        """One step more is done."""
        words = f"loss {result.loss:.4f}  norm {result.grad_norm:.3g}  {result.ms:.0f} ms"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, words=words)
        elif (result.step + 1) % max(1, self._steps // _LINES) == 0 or result.step == 0:
            self.say(f"step {result.step + 1}/{self._steps}  {words}")
