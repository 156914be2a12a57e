"""Errors that say what came, what is allowed and what to do."""

from __future__ import annotations


class SteppeError(Exception):
    """Root of every error that steppe raises on purpose."""


class Refusal(SteppeError, ValueError):
    """Bad input, refused before anything changed: what, got, allowed, remedy."""

    def __init__(self, what: str, *, got: object, allowed: object, remedy: str) -> None:
        self.what, self.got, self.allowed, self.remedy = what, got, allowed, remedy
        super().__init__(f"{what}: got {got}; allowed: {allowed}. Remedy: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.got, self.allowed, self.remedy)


def _rebuild(kind: type[Refusal], what: str, got: object, allowed: object, remedy: str) -> Refusal:
    return kind(what, got=got, allowed=allowed, remedy=remedy)


class ConfigError(Refusal):
    """A configuration value that can't be used."""


class ShapeError(Refusal):
    """Tensors whose shapes, dtypes or devices don't fit together."""


class WorkingSetError(Refusal):
    """More than the working set declared at launch."""


class HostMemoryError(Refusal):
    """Host memory that is not there, or can't be page-locked."""


class DataError(Refusal):
    """Text or tokens that can't be trained on."""


class CheckpointError(Refusal):
    """A checkpoint that can't be trusted or doesn't belong to this run."""


class ConflictError(Refusal):
    """Two pieces of software that would undo each other's work."""


class LaneError(SteppeError, RuntimeError):
    """A copy or job on a lane failed; names lane, stage and buffer."""

    def __init__(self, lane: str, stage: str, buffer: str, reason: str) -> None:
        self.lane, self.stage, self.buffer, self.reason = lane, stage, buffer, reason
        super().__init__(f"lane {lane!r}, stage {stage!r}, buffer {buffer!r}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.lane, self.stage, self.buffer, self.reason)


class LaneTimeout(LaneError):
    """A wait on a lane's ticket ran out of time."""


class CollectiveTimeout(SteppeError, RuntimeError):
    """A collective did not finish in time; names the collective and the peers."""
