"""One JSON line a step; lines of steps that a resumed run takes again are cut off."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from steppe.training.loop import StepResult


class MetricsLog:
    """`metrics.jsonl` of a run; the rank that isn't `shown` writes nothing."""

    def __init__(self, path: Path, *, shown: bool = True) -> None:
        self.path, self._shown = path, shown
        self._file: IO[str] | None = None

    def resume(self, step: int) -> None:
        """Keep the whole lines of the steps before `step`, drop the rest, and append from there."""
        if not self._shown:
            return
        kept = [line for number, line in self._lines() if number < step]
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text("".join(kept))
        os.replace(fresh, self.path)
        self._file = self.path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """On disk before the checkpoint that makes these steps final."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lines(self) -> Iterator[tuple[int, str]]:
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)["step"], line
                except (ValueError, KeyError, TypeError):
                    continue  # cut short by a kill, or not ours: the whole lines beside it stay


def record(result: StepResult, device: torch.device) -> dict[str, Any]:
    """What metrics.jsonl says of a step. `loss_hex` is exact, for comparing runs bit by bit."""
    return {
        "step": result.step,
        "loss": result.loss,
        "loss_hex": result.loss.hex(),
        "aux_loss": result.aux_loss,
        "grad_norm": result.grad_norm,
        "grad_norm_hex": result.grad_norm.hex(),
        "lr": result.lr,
        "tokens": result.num_tokens,
        "valid_tokens": result.num_valid,
        "step_ms": round(result.ms, 3),
        **peak(device),
    }


def peak(device: torch.device) -> dict[str, int]:
    """`peak_bytes` of the device's allocator so far; on the CPU the most that the whole process ever had resident."""
    if device.type == "cpu":
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return {"peak_bytes": torch.accelerator.max_memory_allocated(device)}
