"""One job in an output directory at a time, and no rank that outlives its launcher.

Note [Orphans]
Killing a launcher leaves its ranks alive (each has a session of its own), and they would go on writing into the
directory that a restarted job uses. So every rank asks the kernel to die with its parent, looks for its parent before
each step where the kernel can't do that, and holds a shared lock on one file for life. A job starts by taking that
lock exclusively: it can't, as long as any rank of an earlier job is alive. The kernel drops locks of killed ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from pathlib import Path
from typing import IO, Final

from steppe.core.errors import CheckpointError, SteppeError
from steppe.runtime import collectives
from steppe.training.agreement import on_rank_zero, together

_PR_SET_PDEATHSIG: Final = 1
_POLL_S: Final = 0.05


class Orphaned(SteppeError, RuntimeError):
    """The launcher is gone; this rank stops before it changes anything more."""


class Parent:
    """The launcher of this rank."""

    def __init__(self) -> None:
        self._pid = os.getppid()
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "prctl"):  # Linux: the kernel kills this rank when its launcher goes
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self.check()

    def check(self) -> None:
        """Raises: Orphaned when the launcher has gone."""
        if os.getppid() != self._pid:
            raise Orphaned(f"launcher {self._pid} is gone; rank process {os.getpid()} stops")


class JobLock:
    """Held by every rank of a job from start to end. Raises: CheckpointError if another job's ranks are alive."""

    def __init__(self, directory: Path, group: collectives.Group, timeout_s: float) -> None:
        self._path = directory / "lock"
        self._file: IO[str] | None = None
        on_rank_zero(lambda: self._take_over(timeout_s), group)
        together(self._share, group)

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take_over(self, timeout_s: float) -> None:
        """Wait until no rank of any job holds the lock, take it alone, and step down so that this job's ranks can join.

        Stepping down has a gap in which another job may get in; then this one is refused, and the other runs.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+")
        until = time.monotonic() + timeout_s
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() >= until:
                raise self._taken()
            time.sleep(_POLL_S)
        self._share()

    def _share(self) -> None:
        """Hold it together with the job's other ranks."""
        if self._file is None:
            self._file = self._path.open("a+")
        if not self._try(fcntl.LOCK_SH):
            raise self._taken()

    def _try(self, mode: int) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            f"output directory {self._path.parent}", got="ranks of another job alive in it", allowed="one job",
            remedy="end that job, or choose another output.dir",
        )  # fmt: skip
