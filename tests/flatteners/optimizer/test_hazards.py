"""Lanes that fail or hang, and throttled lanes: errors name stage and bucket; stages overlap."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.errors import LaneError, LaneTimeout, SteppeError
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.crew import Crew, hire, process_cpus
from steppe.flatteners.optimizer.engine import Wiring
from steppe.flatteners.optimizer.kernel import NumpyKernel
from steppe.flatteners.optimizer.pipeline import HostPipeline, Lines
from steppe.flatteners.optimizer.schedule import pipeline_seconds
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane

from .programs import CPU, assert_same, give, parameters, train


class Failing(NumpyKernel):
    """Fails in one call, as a bad disk or a bug would."""

    def __init__(self, at: int) -> None:
        super().__init__("made to fail")
        self.calls, self.at = 0, at

    def update(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError("made to fail")
        super().update(*args)


def _lines(
    timeout_s: float = 20.0, rates: tuple[float | None, float | None, float | None] = (None, None, None)
) -> Lines:
    down, up, work = (
        open_lane(name, CPU, rate=rate, timeout_s=timeout_s)
        for name, rate in zip(("gradients", "parameters", "adamw 0"), rates)
    )
    return Lines(down, up, (work,))


def test_a_workers_failure_names_stage_and_bucket_and_the_next_step_is_refused() -> None:
    rings = Arena("rings", pin=False)
    held = parameters(torch.bfloat16)
    wiring = Wiring(open_lines=lambda _: _lines(), rings=rings, kernel=Failing(at=4))
    optimizer = OffloadStreamAdamW(held, lr=1e-2, bucket_bytes=4096, threads=1, wiring=wiring)
    saved = train(torch.bfloat16, 1)
    give(held, 0)
    with pytest.raises(LaneError, match=r"stage 'update', buffer 'bucket \d+'.*made to fail"):
        optimizer.step()
    assert rings.lent_bytes == 0, "slots came back although the step failed"
    with pytest.raises(SteppeError, match="partly updated"):
        optimizer.step()
    with torch.no_grad():
        for mine, theirs in zip(held, saved[0]):
            mine.copy_(theirs)
    optimizer.load_state_dict(saved[1].state_dict())
    give(held, 1)
    optimizer.step()
    assert_same((held, optimizer), train(torch.bfloat16, 2))


def test_a_wait_that_takes_too_long_names_the_stage_and_the_bucket() -> None:
    release = threading.Event()

    class Stuck(NumpyKernel):
        def update(self, *_: Any) -> None:
            release.wait(5.0)

    held = [nn.Parameter(torch.ones(10))]
    wiring = Wiring(open_lines=lambda _: _lines(timeout_s=0.05), kernel=Stuck("hangs"))
    optimizer = OffloadStreamAdamW(held, wiring=wiring)
    held[0].grad = torch.ones(10)
    with pytest.raises(LaneTimeout, match="stage 'update', buffer 'bucket 0'"):
        optimizer.step()
    release.set()


def _throttled(stage_s: tuple[float, float, float], buckets: int, slots: int = 2) -> float:
    """Seconds of a pipeline whose stages are simulated: bytes (or elements) of a bucket over the lane's rate."""
    bucket_bytes = 4096
    elements = bucket_bytes // 4
    rates = (bucket_bytes / stage_s[0], bucket_bytes / stage_s[2], elements / stage_s[1])
    held = [nn.Parameter(torch.zeros(elements * buckets))]
    optimizer = OffloadStreamAdamW(
        held, bucket_bytes=bucket_bytes, slots=slots, threads=1, wiring=Wiring(open_lines=lambda _: _lines(rates=rates))
    )
    held[0].grad = torch.zeros_like(held[0])
    optimizer.materialize()
    assert isinstance(optimizer._engine.pipeline, HostPipeline)
    started = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - started


def _best(stage_s: tuple[float, float, float], buckets: int, bound: float) -> float:
    """The shortest of a few runs, as many as it takes, told for stages of this length: other programs on the machine
    only ever add time, and the same time to stages that are drawn out."""
    taken = math.inf
    for longer in (1, 1, 1, 2, 2, 4, 4, 8):
        drawn_out = (longer * stage_s[0], longer * stage_s[1], longer * stage_s[2])
        taken = min(taken, _throttled(drawn_out, buckets) / longer)
        if taken <= bound:
            break
    return taken


@pytest.mark.parametrize("stage_s", [(0.03, 0.03, 0.03), (0.03, 0.01, 0.01), (0.01, 0.03, 0.01), (0.01, 0.01, 0.03)])
def test_a_step_takes_the_slowest_stage_and_filling_and_draining(stage_s: tuple[float, float, float]) -> None:
    buckets = 10
    fill_and_drain = sum(stage_s) - max(stage_s)
    bound = 1.1 * buckets * max(stage_s) + fill_and_drain
    taken = _best(stage_s, buckets, bound)
    assert taken <= bound
    assert taken >= buckets * max(stage_s), "the throttle is real"


def test_three_equal_stages_run_at_least_twice_as_fast_as_in_series() -> None:
    buckets, stage = 12, 0.03
    taken = _best((stage, stage, stage), buckets, 3 * buckets * stage / 2.05)
    assert 3 * buckets * stage / taken >= 2.05
    assert pipeline_seconds([(stage, stage, stage)] * buckets, 2) == pytest.approx((buckets + 2) * stage)


def test_a_crew_runs_one_job_a_worker_and_raises_the_first_failure_after_all_are_done() -> None:
    crew = Crew(process_cpus()[:1] * 3, pin=False)
    done: list[int] = []

    def job(number: int) -> None:
        time.sleep(0.01 * number)
        if number == 0:
            raise ValueError("the first")
        done.append(number)

    with pytest.raises(ValueError, match="the first"):
        crew.each([lambda i=i: job(i) for i in range(3)])
    assert done == [1, 2]
    crew.close()


def test_threads_come_from_the_affinity_mask_and_the_local_ranks_share_it() -> None:
    cpus = process_cpus()
    (crew,) = hire(None, 1, "auto", (0, 1))
    assert crew.cpus == cpus
    (half,) = hire(None, 1, "auto", (0, 2))
    assert len(half) == max(1, len(cpus) // 2)
    (many,) = hire(5, 1, "off", (0, 1))
    assert len(many) == 5
    assert [len(each) for each in hire(4, 2, "off", (0, 1))] == [2, 2]


def test_workers_are_pinned_to_their_cpu() -> None:
    import os

    cpu = process_cpus()[-1]
    crew = Crew([cpu])
    seen: list[set[int]] = []
    crew.each([lambda: seen.append(os.sched_getaffinity(0))])
    assert seen == [{cpu}]
    crew.close()
