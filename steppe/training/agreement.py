"""One rank's failure is every rank's failure: nobody is left waiting in a collective."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from steppe.core.errors import CheckpointError, SteppeError
from steppe.runtime import collectives

T = TypeVar("T")


class RankFailure(SteppeError, RuntimeError):
    """What another rank ran into."""


def together(work: Callable[[], T], group: collectives.Group) -> T:
    """Run `work` on every rank; where it fails on any, all raise what the first failing rank raised.

    Raises: the failure itself where it is one of steppe's own or an OSError; else RankFailure naming rank and reason.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        failure = raised
    for rank, (own, text) in enumerate(collectives.all_gather_object(_portable(failure), group)):
        if own is not None:
            raise own from failure
        if text is not None:
            raise RankFailure(f"rank {rank}: {text}") from failure
    return result  # type: ignore[return-value]


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """What fails on the disk under `directory`, or because that is full, is refused with what to do about it."""
    try:
        yield
    except OSError as failure:
        place = Path(str(failure.filename or "")).absolute()
        outside = not ({place, *place.parents} & {directory.absolute()} or place in directory.absolute().parents)
        if outside and failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise CheckpointError(
            f"writing {directory}", got=f"{failure}", allowed="a directory that can be written, with room",
            remedy="check output.dir, its permissions and the disk; what was saved is intact",
        ) from failure  # fmt: skip


def on_rank_zero(work: Callable[[], None], group: collectives.Group) -> None:
    """Run `work` on rank 0 while the others wait; its failure is raised on all."""
    together(work if collectives.rank(group) == 0 else lambda: None, group)


def _portable(failure: Exception | None) -> tuple[Exception | None, str | None]:
    """What can be sent to other ranks: steppe's own errors and OSErrors whole, anything else as text."""
    if failure is None:
        return None, None
    if isinstance(failure, SteppeError | OSError):
        return failure, None
    return None, f"{type(failure).__name__}: {failure}"
