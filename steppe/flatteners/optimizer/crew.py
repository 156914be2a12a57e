"""The threads that run the host arithmetic: one executor a CPU, pinned, sized from the affinity mask.

Note [affinity]. Importing torch under OMP_PROC_BIND shrinks the main thread's own mask to one CPU, and a thread started
by a pinned thread inherits the pin. So the process's CPUs are the union of the masks of all its threads, and every
worker pins itself. OMP_NUM_THREADS, which launchers set to 1, plays no part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from steppe.flatteners.optimizer.schedule import by_node, cpu_share

_TASKS = Path("/proc/self/task")
_NODES = Path("/sys/devices/system/node")


class Crew:
    """Workers that each do one job of a batch. `each` returns when all are done and raises the first failure."""

    def __init__(self, cpus: Sequence[int], *, pin: bool = True) -> None:
        self.cpus = tuple(cpus)
        self.busy_seconds = 0.0
        self._workers = [
            ThreadPoolExecutor(1, f"steppe-adamw-{cpu}", _pin_to if pin else None, (cpu,) if pin else ())
            for cpu in self.cpus
        ]

    def __len__(self) -> int:
        return len(self._workers)

    def each(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run job i on worker i; at most as many jobs as workers."""
        assert len(jobs) <= len(self)
        started = time.perf_counter()
        futures: list[Future[None]] = [worker.submit(job) for worker, job in zip(self._workers, jobs)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        self.busy_seconds += time.perf_counter() - started
        if failures:
            raise failures[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=False)


def hire(threads: int | None, streams: int, numa: str, share: tuple[int, int]) -> tuple[Crew, ...]:
    """One crew for each stream, from this process's part (`share` = local rank, local ranks) of the node's CPUs.

    `numa="auto"` gives each stream the CPUs of its own NUMA nodes and pins; `numa="off"` leaves threads unpinned.
    """
    cpus = cpu_share(process_cpus(), *share)
    groups = by_node(cpus, numa_nodes(), streams)
    if threads is not None:
        per_stream = max(1, threads // streams)
        groups = tuple(tuple(group[i % len(group)] for i in range(per_stream)) for group in groups)
    return tuple(Crew(group, pin=numa == "auto") for group in groups)


def process_cpus() -> tuple[int, ...]:
    """The CPUs that any thread of this process may use (Note [affinity])."""
    if not _TASKS.exists():
        return tuple(range(os.cpu_count() or 1))
    cpus: set[int] = set()
    for task in _TASKS.iterdir():
        try:
            cpus |= os.sched_getaffinity(int(task.name))
        except ProcessLookupError:  # the thread has ended meanwhile
            continue
    return tuple(sorted(cpus))


def numa_nodes() -> tuple[tuple[int, ...], ...]:
    """The CPUs of every NUMA node; empty where the system doesn't say."""
    lists = sorted(_NODES.glob("node[0-9]*/cpulist")) if _NODES.exists() else ()
    return tuple(nodes for path in lists if (nodes := _parse(path.read_text())))


def _parse(cpulist: str) -> tuple[int, ...]:
    cpus: list[int] = []
    for part in cpulist.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def _pin_to(cpu: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})  # 0 is the calling thread
