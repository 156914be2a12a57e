"""Interleaved timing: candidates alternate within one run and only their ratios count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def interleaved(candidates: Mapping[str, Callable[[], object]], *, rounds: int = 7, warm_up: int = 1) -> dict[str, Any]:
    """Time candidates in alternation. The first one named is the baseline.

    Returns `times_ms` (median per candidate), and for every other candidate `ratio` (median over rounds of its time
    over the baseline's of the same round) and `spread` (lowest and highest of these ratios).
    """
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + rounds):
        # The order turns around every round, so that whatever a predecessor leaves behind cancels out.
        for name in names if turn % 2 else reversed(names):
            taken = _time_ms(candidates[name])
            if turn >= warm_up:
                times[name].append(taken)
    base = times[names[0]]
    ratios = {name: [own / plain for own, plain in zip(times[name], base, strict=True)] for name in names[1:]}
    return {
        "times_ms": {name: round(statistics.median(taken), 3) for name, taken in times.items()},
        "ratio": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "spread": {name: [round(min(values), 4), round(max(values), 4)] for name, values in ratios.items()},
        "rounds": rounds,
        "baseline": names[0],
    }


def _time_ms(fn: Callable[[], object]) -> float:
    _synchronize()
    started = time.perf_counter()
    fn()
    _synchronize()
    return (time.perf_counter() - started) * 1e3


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
