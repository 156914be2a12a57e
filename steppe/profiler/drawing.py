"""The picture of a step: memory stacked by owner over time, runs side by side, the four peaks in colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from steppe.core.ledger import PEAKS
from steppe.core.units import GiB, MiB, format_bytes
from steppe.runtime.timeline import Timeline

# Told apart by people with any colour vision (Okabe and Ito); greys for the rest.
COLOURS: Final = {
    "weights": "#5e5e5e", "optimizer": "#cc79a7", "gradients": "#8a8a8a", "gathered": "#a3a3a3",
    "communication": "#b5b5b5", "boundary": "#009e73", "dispatch": "#d55e00", "vocab": "#0072b2",
    "attention": "#c6c6c6", "router": "#d6d6d6", "other": "#e6e6e6",
}  # fmt: skip
_UNKNOWN: Final = "#f0f0f0"
_LARGE: Final = 4 * GiB  # from here on the axis counts in GiB
_POINTS: Final = 1500
_NOTHING: Final = np.zeros(0, dtype=np.int64)


def picture(path: str | Path, timelines: Mapping[str, Timeline]) -> None:
    """Draw runs side by side on one memory axis and write the image; the file's ending names the format.

    Raises: ModuleNotFoundError when matplotlib (extra `train`) is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 + 5.2 * len(timelines), 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    top = max((timeline.peak[1] for timeline in timelines.values()), default=0)
    unit, factor = ("GiB", GiB) if top >= _LARGE else ("MiB", MiB)
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(panel, name, timeline, factor)
    panels[0].set_ylabel(f"memory on the device, {unit}")
    panels[0].set_ylim(0, max(top / factor, 1e-3) * 1.12)
    _legend(figure, timelines)
    figure.suptitle("Memory of a training step, by owner", fontsize=13)
    figure.savefig(path)


def _draw(panel: Any, name: str, timeline: Timeline, factor: int) -> None:
    small = timeline.compact(_POINTS)
    ms, base = small.seconds * 1e3, np.zeros(small.seconds.size)
    for owner in _stacked(small):
        layer = base + small.held[small.owners.index(owner)] / factor
        panel.fill_between(ms, base, layer, step="post", color=COLOURS.get(owner, _UNKNOWN), linewidth=0)
        base = layer
    panel.step(ms, base, where="post", color="#202020", linewidth=0.7)
    panel.set_title(name, fontsize=12, fontweight="bold", pad=34)
    panel.set_xlabel("time, ms")
    panel.margins(x=0)
    panel.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    _mark(panel, timeline)
    _annotate(panel, timeline, factor)


def _annotate(panel: Any, timeline: Timeline, factor: int) -> None:
    seconds, num_bytes = timeline.peak
    end = float(timeline.seconds[-1]) if timeline.seconds.size else 0.0
    late = seconds > 0.6 * end
    panel.axhline(num_bytes / factor, color="#202020", linewidth=0.8, linestyle=(0, (4, 3)))
    panel.plot([seconds * 1e3], [num_bytes / factor], "o", color="#202020", markersize=5, zorder=5)
    panel.annotate(
        f"peak {format_bytes(num_bytes)}", (seconds * 1e3, num_bytes / factor), xytext=(-8 if late else 8, 7),
        textcoords="offset points", ha="right" if late else "left", fontsize=11, fontweight="bold",
    )  # fmt: skip


def _mark(panel: Any, timeline: Timeline) -> None:
    """Where each phase begins, its name above the plot; neighbours stand on two lines, so that both can be read."""
    for place, (seconds, name) in enumerate(timeline.marks):
        panel.axvline(seconds * 1e3, color="#202020", linewidth=0.7, linestyle=":", alpha=0.7)
        panel.text(
            seconds * 1e3, 1.01 + 0.04 * (place % 2), name, transform=panel.get_xaxis_transform(), va="bottom",
            ha="left", fontsize=8.5, color="#404040",
        )  # fmt: skip


def _stacked(timeline: Timeline) -> list[str]:
    """Owners from the bottom up: what stays at the bottom, what comes and goes above."""
    held = {owner for owner, row in zip(timeline.owners, timeline.held, strict=True) if row.any()}
    return [owner for owner in COLOURS if owner in held] + sorted(held - set(COLOURS))


def _legend(figure: Any, timelines: Mapping[str, Timeline]) -> None:
    """One legend for all panels: the four peaks first, then who else holds something, each with its most."""
    from matplotlib.patches import Patch

    runs = list(timelines.values())
    present = {owner for timeline in runs for owner in _stacked(timeline)}
    others = [owner for owner in [*COLOURS, *sorted(present - set(COLOURS))] if owner in present and owner not in PEAKS]
    patches = [
        Patch(color=COLOURS.get(owner, _UNKNOWN), label=f"{owner}  {_most(owner, runs)}") for owner in [*PEAKS, *others]
    ]
    title = "most held" + (f"\n{' | '.join(timelines)}" if len(runs) > 1 else "")
    figure.legend(
        handles=patches, loc="outside right center", fontsize=9.5, frameon=False, title=title, alignment="left"
    )


def _most(owner: str, timelines: list[Timeline]) -> str:
    rows = [t.held[t.owners.index(owner)] if owner in t.owners else _NOTHING for t in timelines]
    return " | ".join(format_bytes(int(row.max(initial=0))) for row in rows)
