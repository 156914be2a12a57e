"""A picture of the answer: who holds the device, plain beside flattened. Loads matplotlib when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steppe.core.errors import ConfigError
from steppe.core.ledger import OWNERS
from steppe.core.units import GiB, format_tokens
from steppe.planner.answer import Answer

COLOURS = {
    "dispatch": "#d55e00", "vocab": "#0072b2", "boundary": "#009e73", "optimizer": "#cc79a7", "weights": "#555555",
    "gradients": "#777777", "gathered": "#999999", "attention": "#e69f00", "router": "#f0e442",
    "communication": "#56b4e9", "other": "#bbbbbb",
}  # fmt: skip


def draw(told: Answer, path: str | Path) -> None:
    """Stacked bars of the device peak by owner, with the device's memory as a line.

    Raises: ConfigError when matplotlib isn't installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 5))
    sides = {"plain": told.plain, "flattened": told.flattened}
    bottoms = dict.fromkeys(sides, 0.0)
    for owner in OWNERS:
        heights = {n: side.chosen.forecast.ledger.holders.get(owner, 0) / GiB for n, side in sides.items()}
        if any(heights.values()):
            axes.bar(
                list(sides), list(heights.values()), bottom=list(bottoms.values()), label=owner, color=COLOURS[owner]
            )
            bottoms = {name: bottoms[name] + heights[name] for name in sides}
    axes.axhline(told.job.machine.device_memory_bytes / GiB, color="black", linestyle="--", linewidth=1)
    axes.set_ylabel("GiB on a device, at the peak")
    axes.set_title(f"{told.model}, S {format_tokens(told.job.batch.seq_len)}, {told.job.world} ranks")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as missing:
        raise ConfigError(
            "--picture", got="matplotlib is not installed", allowed="matplotlib >= 3.9", remedy="pip install matplotlib"
        ) from missing
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
