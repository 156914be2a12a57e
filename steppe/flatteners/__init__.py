"""The four flatteners. Everything above loops over `NAMES` and reaches the two halves through `half`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Final

from steppe.core.ledger import PEAKS

NAMES: Final = PEAKS
DECISION_ORDER: Final = ("optimizer", "vocab", "dispatch", "boundary")  # of the method: what to flatten first


def half(flattener: str, part: str) -> ModuleType:
    """Load one file of one flattener: `half("vocab", "budget")`."""
    return import_module(f"steppe.flatteners.{flattener}.{part}")
