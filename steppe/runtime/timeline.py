"""Memory over time: how many bytes each owner held after every change, small enough to keep and to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """`held[o, t]` bytes of `owners[o]` from `seconds[t]` on; `marks` are (seconds, name) of what began there."""

    owners: tuple[str, ...]
    seconds: Floats  # [times]
    held: Ints  # [owners, times]
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def total(self) -> Ints:
        """Bytes of all owners together, [times]."""
        total: Ints = self.held.sum(axis=0)
        return total

    @property
    def peak(self) -> tuple[float, int]:
        """(seconds, bytes) of the highest total."""
        if not self.seconds.size:
            return 0.0, 0
        top = int(self.total.argmax())
        return float(self.seconds[top]), int(self.total[top])

    def compact(self, points: int) -> Timeline:
        """At most `points` columns: of each stretch the one with the highest total, so no peak is lost."""
        if self.seconds.size <= points:
            return self
        edges = np.linspace(0, self.seconds.size, points + 1).astype(np.int64)
        total = self.total
        kept = [int(a + total[a:b].argmax()) for a, b in pairwise(edges)]
        return Timeline(self.owners, self.seconds[kept], self.held[:, kept], self.marks)

    def to_json(self, points: int = 2000) -> dict[str, Any]:
        """A JSON-ready dictionary of at most `points` columns."""
        small = self.compact(points)
        return {
            "owners": list(small.owners),
            "seconds": [round(s, 6) for s in small.seconds.tolist()],
            "held": small.held.tolist(),
            "marks": [[round(s, 6), name] for s, name in small.marks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        return cls(
            owners=tuple(data["owners"]),
            seconds=np.asarray(data["seconds"], dtype=np.float64),
            held=np.asarray(data["held"], dtype=np.int64).reshape(len(data["owners"]), len(data["seconds"])),
            marks=tuple((float(s), str(name)) for s, name in data.get("marks", ())),
        )


def phases(codes: npt.NDArray[np.int8], seconds: Floats) -> list[tuple[float, int]]:
    """(start, code) of each stretch of equal codes; fewer than three of them, or 0.5% of the time, are passed over."""
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    num_inside = np.diff(starts, append=codes.size)
    ends = np.append(seconds[starts[1:]], seconds[-1:])
    lasting = (num_inside >= 3) & (ends - seconds[starts] >= 0.005 * np.ptp(seconds)) if codes.size else starts > 0
    found: list[tuple[float, int]] = []
    for start in starts[lasting]:
        if not found or found[-1][1] != codes[start]:
            found.append((float(seconds[start]), int(codes[start])))
    return found


def fold(owners: Sequence[str], deltas: Ints) -> tuple[tuple[str, ...], Ints]:
    """Running bytes by owner, [owners, changes]: `owners[i]` gained `deltas[i]` bytes at change i."""
    names = tuple(dict.fromkeys(owners))
    rows = {name: i for i, name in enumerate(names)}
    held = np.zeros((len(names), len(deltas)), dtype=np.int64)
    if len(deltas):
        held[np.fromiter((rows[o] for o in owners), dtype=np.int64, count=len(deltas)), np.arange(len(deltas))] = deltas
    return names, np.cumsum(held, axis=1, out=held)
