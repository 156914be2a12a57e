"""The allocator's own peak: scratch inside operators, frees on other threads, what was alive before."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steppe.runtime.allocator import _Span, _spans, _sweep, allocator_peak
from steppe.runtime.arena import Arena
from tests.support.peaks import assert_peak, measured_peak

FLOATS = 1 << 18
NUM_BYTES = 4 * FLOATS
SMALL = "scalars and index buffers of the operators"


def test_the_peak_is_what_is_alive_at_one_time_not_what_was_allocated():
    def one_after_another():
        for _ in range(5):
            torch.empty(FLOATS)

    assert_peak(measured_peak(one_after_another), NUM_BYTES, 0, "nothing else is allocated")


def test_scratch_inside_an_operator_counts():
    x = torch.zeros(512, 512)
    # logsumexp: exp(x - max) at the size of its input, then vectors of 512
    assert_peak(measured_peak(lambda: torch.logsumexp(x, 0)), x.nbytes, 8 * 2048, "vectors of 512 floats")


def test_the_result_comes_back():
    found = allocator_peak(lambda: torch.ones(3))
    assert found.result.tolist() == [1.0, 1.0, 1.0]
    assert found.base_bytes == 0


def test_a_tensor_freed_on_another_thread_is_not_alive_for_ever():
    """The profiler reports no free of another thread: without the deaths this would read two tensors."""

    def step():
        box = [torch.empty(FLOATS)]
        worker = threading.Thread(target=box.clear)
        worker.start()
        worker.join()
        time.sleep(0.001)
        keep = torch.empty(2 * FLOATS)  # another size, so that the address is a new one
        return keep.numel()

    assert_peak(measured_peak(step), 2 * NUM_BYTES, 0, "nothing else is allocated")


def test_the_end_of_what_was_alive_before_counts_where_it_is_named():
    before = [torch.empty(FLOATS)]
    alive = tuple(before)

    def replace(held):
        del held[:]
        return torch.empty(FLOATS)

    held = list(alive)
    del before, alive
    named = allocator_peak(lambda: replace(held), alive=iter(held))
    assert (named.base_bytes, named.peak_bytes) == (NUM_BYTES, NUM_BYTES)


def test_blocks_of_a_host_arena_are_not_the_devices():
    def step():
        arena = Arena("boundaries", pin=False)
        block = arena.lend(8 * NUM_BYTES, "boundary")
        kept = torch.empty(FLOATS)
        block.give_back()
        arena.close()
        return kept.numel()

    assert_peak(measured_peak(step), NUM_BYTES, 0, "nothing else is allocated")


def test_an_exception_passes_through():
    def fails():
        raise RuntimeError("in fn")

    with pytest.raises(RuntimeError, match="in fn"):
        allocator_peak(fails)
    assert "resize_" not in torch.UntypedStorage.__dict__


def test_an_unreported_free_ends_at_the_heard_death_or_at_the_next_use_of_the_address():
    events = [(10, 1, 100), (20, 1, -100), (30, 1, 100), (50, 1, 100), (60, 2, 7)]
    spans = _spans(events, {1: [19, 35]}, {})
    assert sorted(spans) == [_Span(7, 60, None), _Span(100, 10, 20), _Span(100, 30, 35), _Span(100, 50, None)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(1, 20)), max_size=12))
def test_the_sweep_equals_counting_at_every_instant(raw):
    spans = [_Span(size, start, start + length) for size, start, length in raw]
    naive = max((sum(s.num_bytes for s in spans if s.start_ns <= t < s.end_ns) for t in range(45)), default=0)
    assert _sweep(spans) == naive


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_accelerator_answers_by_its_caching_allocator():
    found = allocator_peak(lambda: torch.empty(FLOATS, device="cuda").numel())
    assert found.peak_bytes - found.base_bytes == NUM_BYTES
