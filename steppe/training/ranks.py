"""Ranks: where this process stands, how a command starts its own ranks, and their process group."""

from __future__ import annotations

import datetime
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from steppe.core.errors import CollectiveTimeout, ConfigError, SteppeError
from steppe.training.meeting import meet

_ECHO = re.compile(r"gloo|NCCL|by peer|connection", re.IGNORECASE)
_ECHO_S = 3.0
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's launchers look for a rank's last words


class JobFailed(SteppeError, RuntimeError):
    """A rank failed; the message is that rank's own."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as torchrun says in the environment."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher_listens: bool  # the launcher reports this rank's failure, so the rank need not print it
    restarted: bool = False  # the launcher has started these ranks again after one of them failed

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """None outside of a launcher. Raises: ConfigError for an environment that is half a launcher's."""
        if "RANK" not in environment:
            return None
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local_rank, local_world = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
            restarts = int(environment.get(_RESTARTS, "0"))
        except (KeyError, ValueError) as failure:
            raise ConfigError(
                "the launcher's environment", got=f"RANK, but {failure}",
                allowed="whole numbers in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE",
                remedy="start through torchrun, or unset RANK and use --ranks",
            ) from failure  # fmt: skip
        return cls(rank, world, local_rank, local_world, _ERROR_FILE in environment, restarts > 0)


def start_ranks(arguments: Sequence[str], ranks: int, module: str = "steppe.cli") -> None:
    """Run `steppe <arguments>` (or another module's main) on so many ranks here, through torch's elastic agent.

    One rank's failure ends all, and so does a signal. Raises: JobFailed with that rank's message or the signal's name;
    KeyboardInterrupt for an interrupt.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=f"steppe-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, local_addr="localhost",
    )  # fmt: skip
    try:
        elastic_launch(settings, sys.executable)("-m", module, *arguments)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        raise JobFailed(f"rank {rank} (process {first.pid}): {_last_words(first.message)}") from None
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise JobFailed(f"stopped by {stopped.sigval.name}, and its ranks with it") from None


def on_this_rank(work: Callable[[torch.device], int], place: Place, timeout_s: float) -> int:
    """Run `work(device)` inside the ranks' process group; returns its exit code.

    A failure is printed, reaches the launcher through torch's error file, and ends this rank without waiting for the
    others, who may hang in a collective: the launcher ends those.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    def inside() -> int:
        with process_group(place, timeout_s) as device:
            return work(device)

    try:
        return record(inside)() or 0
    except Exception as failure:
        if not place.launcher_listens:
            raise
        if _is_echo(failure):
            time.sleep(_ECHO_S)  # whose doing it was ends first, so that the launcher reports that one and ends this
        print(f"steppe: rank {place.rank} failed: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
        os._exit(2)


def _is_echo(failure: Exception) -> bool:
    """Whether a failure looks like another rank's, seen from a collective with it."""
    return isinstance(failure, CollectiveTimeout | dist.DistError) or bool(_ECHO.search(str(failure)))


@contextmanager
def process_group(place: Place, timeout_s: float) -> Iterator[torch.device]:
    """The ranks' process group (rendezvous by the launcher's environment) and this rank's device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world))
        device, backend = torch.device("cpu"), "gloo"
    else:
        torch.accelerator.set_device_index(place.local_rank)
        device, backend = torch.device(accelerator.type, place.local_rank), None
    timeout = datetime.timedelta(seconds=timeout_s)
    store = meet(place.rank, place.world, timeout_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    yield device
    # After a failure nobody may wait: leaving the group is a collective of sorts.
    dist.barrier()
    dist.destroy_process_group()


def _last_words(message: object) -> str:
    """What the rank itself would have printed: torch's error file holds the message, or a whole traceback."""
    if isinstance(message, Mapping):
        message = message.get("message", "")
    lines = [line for line in str(message).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
