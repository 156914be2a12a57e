"""How fast this machine's host updates parameters, for the machine's calibration."""

from __future__ import annotations

import time

import torch

from steppe.flatteners.optimizer.crew import Crew, process_cpus
from steppe.flatteners.optimizer.kernel import load_kernel
from steppe.flatteners.optimizer.pipeline import HostPipeline, Lines, Task
from steppe.flatteners.optimizer.rows import open_rows
from steppe.flatteners.optimizer.schedule import fold
from steppe.runtime.arena import Arena


def kernel_seconds(count: int, threads: int) -> float:
    """Seconds of one AdamW pass over `count` bfloat16 parameters, by the kernel that runs here, on `threads` threads.

    Peak: 16 bytes a parameter while it runs. Allocation and first touch are not timed.
    """
    parameter = torch.zeros(count, dtype=torch.bfloat16)
    (row,) = open_rows([parameter], Arena("calibration", pin=False), gradients=False).values()
    cpus = process_cpus()
    crew = Crew([cpus[i % len(cpus)] for i in range(threads)])
    pipeline = HostPipeline(Lines(), (crew,), load_kernel(), Arena("no rings", pin=False), slots=1)
    pipeline.reserve(2 * max(1, count))
    task = Task(row, torch.ones_like(parameter), parameter, fold(1e-3, (0.9, 0.999), 1e-8, 1e-2, 1))
    pipeline.run([task])  # threads start at their first job
    started = time.perf_counter()
    pipeline.run([task])
    taken = time.perf_counter() - started
    crew.close()
    return taken
