"""What the two halves of every flattener agree on: off, verdicts, conflicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Off:
    """The policy of a flattener that is switched off: the plain program."""

    def __str__(self) -> str:
        return "off"


OFF: Final = Off()


@dataclass(frozen=True)
class Verdict:
    """Whether a flattener pays on a shape and machine, and why, in words with numbers."""

    on: bool
    why: str


@dataclass(frozen=True)
class Conflict:
    """Two live things that would undo each other's work, and what to do about it."""

    what: str
    remedy: str
