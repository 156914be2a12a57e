"""Lanes: order, references, failures, time-outs and delays."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from steppe.core.errors import LaneError, LaneTimeout
from steppe.runtime.lanes import open_lane

CPU = torch.device("cpu")


def test_a_copy_really_happens_later() -> None:
    lane = open_lane("later", CPU, delay=lambda: 0.05)
    dst = torch.zeros(4)
    ticket = lane.copy(dst, torch.ones(4))
    assert not ticket.done()
    assert dst.tolist() == [0.0] * 4, "an unwaited copy must not be visible yet, or ordering mistakes can't show"
    ticket.wait()
    assert ticket.done()
    assert dst.tolist() == [1.0] * 4
    lane.close()


def test_jobs_run_in_the_order_in_which_they_were_given() -> None:
    delays = random.Random(0)
    lane = open_lane("fifo", CPU, delay=lambda: delays.random() * 0.002)
    seen: list[int] = []
    for i in range(20):
        lane.run(lambda i=i: seen.append(i))
    lane.drain()
    assert seen == list(range(20))
    lane.close()


def test_a_job_waits_for_the_tickets_of_other_lanes() -> None:
    slow, fast = open_lane("slow", CPU, delay=lambda: 0.05), open_lane("fast", CPU)
    middle, out = torch.zeros(1), torch.zeros(1)
    arrived = slow.copy(middle, torch.ones(1))
    fast.copy(out, middle, after=[arrived, slow.mark()]).wait()
    assert out.item() == 1.0
    slow.close()
    fast.close()


def test_a_failure_names_lane_stage_and_buffer_at_the_wait() -> None:
    lane = open_lane("to_host", CPU)
    ticket = lane.copy(torch.zeros(2), torch.zeros(3), stage="gradient", buffer="bucket 7")
    with pytest.raises(LaneError, match=r"lane 'to_host', stage 'gradient', buffer 'bucket 7'"):
        ticket.wait()
    lane.run(lambda: None).wait()  # a reported failure is not reported again
    lane.close()


def test_a_failure_nobody_waited_for_is_raised_at_the_next_call() -> None:
    lane = open_lane("silent", CPU)
    done = threading.Event()
    lane.run(lambda: 1 // 0, stage="update")
    lane.run(done.set)
    done.wait(5)
    with pytest.raises(LaneError, match="ZeroDivisionError"):
        lane.run(lambda: None)
    lane.close()


def test_a_job_behind_a_failed_one_fails_with_its_reason() -> None:
    first, second = open_lane("first", CPU), open_lane("second", CPU)
    broken = first.run(lambda: 1 // 0)
    with pytest.raises(LaneError, match="ZeroDivisionError"):
        second.run(lambda: None, after=broken).wait()
    second.close()


def test_a_wait_runs_out_of_time_with_the_buffer_named() -> None:
    lane = open_lane("stuck", CPU, timeout_s=0.05)
    release = threading.Event()
    ticket = lane.run(release.wait, stage="reload", buffer="boundary 3")
    with pytest.raises(LaneTimeout, match=r"stage 'reload', buffer 'boundary 3': not finished after 0\.05 s"):
        ticket.wait()
    release.set()
    ticket.wait(5)
    lane.close()


def test_a_finished_copy_keeps_no_tensor_alive() -> None:
    lane = open_lane("refs", CPU)
    src, dst = torch.ones(4), torch.zeros(4)
    watch = weakref.ref(src), weakref.ref(dst)
    ticket = lane.copy(dst, src)
    del src, dst
    gc.collect()
    ticket.wait()
    del ticket
    lane.drain()
    gc.collect()
    assert [ref() for ref in watch] == [None, None]
    lane.close()


def test_a_pending_copy_keeps_its_source_alive() -> None:
    lane = open_lane("refs", CPU, delay=lambda: 0.03)
    src, dst = torch.ones(4), torch.zeros(4)
    watch = weakref.ref(src)
    ticket = lane.copy(dst, src)
    del src
    assert watch() is not None
    ticket.wait()
    assert dst.tolist() == [1.0] * 4
    lane.close()


def test_a_copy_joins_no_graph() -> None:
    lane = open_lane("grad", CPU)
    src = torch.ones(3, requires_grad=True) * 2
    dst = torch.zeros(3)
    lane.copy(dst, src).wait()
    assert not dst.requires_grad
    seen: list[bool] = []
    lane.run(lambda: seen.append(torch.is_grad_enabled())).wait()
    assert seen == [False], "a new thread starts with grad mode on"
    lane.close()


def test_a_rate_throttles_copies_to_the_link() -> None:
    lane = open_lane("link", CPU, rate=1e6)
    started = time.monotonic()
    lane.copy(torch.zeros(25_000), torch.zeros(25_000)).wait()  # 100 kB at 1 MB/s
    assert time.monotonic() - started >= 0.1
    lane.close()


def test_a_closed_lane_takes_no_work() -> None:
    lane = open_lane("closed", CPU)
    lane.close()
    with pytest.raises(LaneError, match="closed"):
        lane.run(lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_stream_lane_orders_itself_after_compute_and_before_its_ticket() -> None:
    device = torch.device("cuda", 0)
    lane = open_lane("stream", device)
    host = torch.empty(1 << 22, pin_memory=True)
    for value in range(4):
        source = torch.full((1 << 22,), float(value), device=device)
        out = lane.copy(host, source, after=lane.mark())
        back = torch.empty_like(source)
        into = lane.copy(back, host, after=out)
        into.wait()
        assert (back == value).all()
    lane.close()
