"""One link, several lanes: urgent ones first, each FIFO, nobody starved, nobody deadlocked."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from steppe.core.errors import LaneError
from steppe.runtime.lanes import open_lane
from steppe.runtime.link import HostLink

CPU = torch.device("cpu")


def test_urgent_jobs_overtake_ordinary_ones_that_have_not_started() -> None:
    link, seen = HostLink(CPU), []
    ordinary, urgent = link.lane("optimizer", "to_device"), link.lane("boundary", "to_device", urgent=True)
    gate = threading.Event()
    ordinary.run(gate.wait)
    for i in range(3):
        ordinary.run(lambda i=i: seen.append(("ordinary", i)))
    for i in range(3):
        urgent.run(lambda i=i: seen.append(("urgent", i)))
    gate.set()
    ordinary.drain()
    urgent.drain()
    assert seen == [("urgent", i) for i in range(3)] + [("ordinary", i) for i in range(3)]
    link.close()


def test_directions_do_not_wait_for_each_other() -> None:
    link, gate = HostLink(CPU), threading.Event()
    link.lane("a", "to_host", urgent=True).run(gate.wait)
    link.lane("b", "to_device").run(lambda: None).wait(5)
    gate.set()
    link.close()


def test_an_ordinary_job_waiting_for_an_urgent_one_does_not_hold_it_up() -> None:
    link = HostLink(CPU, timeout_s=5)
    ordinary, urgent = link.lane("o", "to_host"), link.lane("u", "to_host", urgent=True)
    elsewhere = open_lane("elsewhere", CPU)
    gate = threading.Event()
    held = elsewhere.run(gate.wait)
    behind = ordinary.run(lambda: None, after=held)
    time.sleep(0.01)  # the worker sees the ordinary head first, not ready
    first = urgent.run(gate.set)
    first.wait()
    behind.wait()
    link.close()
    elsewhere.close()


def test_each_lane_stays_fifo_whatever_the_delays() -> None:
    delays = random.Random(1)
    link = HostLink(CPU, delay=lambda: delays.random() * 0.001)
    lanes = [link.lane(str(i), "to_host", urgent=i % 2 == 0) for i in range(4)]
    seen: list[tuple[int, int]] = []
    for turn in range(10):
        for i, lane in enumerate(lanes):
            lane.run(lambda i=i, turn=turn: seen.append((i, turn)))
    for lane in lanes:
        lane.drain()
    for i in range(4):
        assert [turn for lane, turn in seen if lane == i] == list(range(10))
    link.close()


def test_a_failure_is_its_own_lanes() -> None:
    link = HostLink(CPU)
    good, bad = link.lane("good", "to_host"), link.lane("bad", "to_host")
    broken = bad.run(lambda: 1 // 0, stage="gradient")
    good.run(lambda: None).wait()
    with pytest.raises(LaneError, match="lane 'bad', stage 'gradient'"):
        broken.wait()
    link.close()


def test_copies_share_the_rate_of_their_direction() -> None:
    link = HostLink(CPU, rate=1e6)
    a, b = link.lane("a", "to_host"), link.lane("b", "to_host")
    started = time.monotonic()
    tickets = [lane.copy(torch.zeros(12_500), torch.ones(12_500)) for lane in (a, b)]  # 50 kB each at 1 MB/s
    for ticket in tickets:
        ticket.wait()
    assert time.monotonic() - started >= 0.1
    link.close()


def test_a_closed_link_has_finished_its_jobs_and_takes_no_more() -> None:
    link, done = HostLink(CPU), []
    lane = link.lane("a", "to_host")
    lane.run(lambda: (time.sleep(0.01), done.append(1)))
    link.close()
    assert done == [1]
    with pytest.raises(LaneError, match="closed"):
        lane.run(lambda: None)
