"""A step under the meter: `with profile(model, optimizer) as report: step()` -> ledger, table, advice, picture."""

from __future__ import annotations

from steppe.profiler.drawing import picture
from steppe.profiler.reading import table
from steppe.profiler.report import Report, profile

__all__ = ["Report", "picture", "profile", "table"]
