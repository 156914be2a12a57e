"""Arenas: exact sizes, lending, caps, poison and refusals."""

from __future__ import annotations

import resource

import pytest
import torch

from steppe.core.errors import HostMemoryError, SteppeError
from steppe.runtime import arena as arenas
from steppe.runtime.arena import Arena


def test_blocks_have_exactly_the_size_asked_for() -> None:
    arena = Arena("exact", pin=False)
    sizes = [1, 4097, 1_000_003]
    blocks = [arena.lend(size, "boundary") for size in sizes]
    assert [block.num_bytes for block in blocks] == sizes
    assert arena.reserved_bytes == arena.lent_bytes == arena.high_water_bytes == sum(sizes)


def test_a_returned_block_is_lent_again() -> None:
    arena = Arena("reuse", pin=False)
    first = arena.lend(100, "a")
    first.give_back()
    assert arena.lend(100, "b") is first
    assert arena.reserved_bytes == 100
    assert arena.lent_bytes == 100


def test_a_block_returned_twice_is_an_error() -> None:
    arena = Arena("twice", pin=False)
    block = arena.lend(8, "a")
    block.give_back()
    with pytest.raises(SteppeError, match="came back twice"):
        block.give_back()
    assert arena.lent_bytes == 0
    with pytest.raises(SteppeError, match="while not lent"):
        block.view((2,), torch.float32)


def test_reserving_ahead_means_no_allocation_later() -> None:
    arena = Arena("ahead", pin=False)
    arena.reserve(64, count=3)
    assert arena.reserved_bytes == 192
    for _ in range(3):
        arena.lend(64, "a")
    assert arena.reserved_bytes == 192


def test_poisoned_blocks_read_as_nan_in_every_float_type() -> None:
    arena = Arena("poison", pin=False, poison=True)
    block = arena.lend(64, "a")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert block.view((64 // dtype.itemsize,), dtype).isnan().all()
    kept = block.view((16,), torch.float32)
    kept.zero_()
    block.give_back()
    assert kept.isnan().all()


def test_the_cap_is_refused_with_the_bytes_missing_and_nothing_lost() -> None:
    arena = Arena("capped", cap_bytes=100, pin=False)
    arena.lend(60, "a")
    with pytest.raises(HostMemoryError, match="20 bytes too many"):
        arena.lend(60, "b")
    assert arena.lent_bytes == arena.reserved_bytes == 60
    arena.lend(40, "c")


def test_memory_that_is_not_there_is_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "free_host_bytes", lambda: 1000)
    with pytest.raises(HostMemoryError, match="24 bytes more than there are"):
        Arena("small", pin=False).reserve(1024)


def test_a_low_page_lock_limit_is_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    arena = Arena("pinned", pin=True)
    with pytest.raises(HostMemoryError, match=r"904 bytes over the limit.*ulimit -l.*pin=False"):
        arena.lend(5000, "boundary")
    assert arena.reserved_bytes == arena.lent_bytes == 0


def test_a_block_born_in_inference_mode_can_be_written_later() -> None:
    arena = Arena("inference", pin=False)
    with torch.inference_mode():
        block = arena.lend(16, "a")
    view = block.view((4,), torch.float32)
    view.copy_(torch.ones(4))
    assert view.tolist() == [1.0] * 4


def test_a_view_larger_than_its_block_is_refused() -> None:
    block = Arena("view", pin=False).lend(16, "a")
    with pytest.raises(SteppeError, match="20 bytes wanted of a block of 16"):
        block.view((5,), torch.float32)


def test_zero_bytes_are_lent_like_any_other_size() -> None:
    block = Arena("zero", pin=False).lend(0, "empty shard")
    assert block.view((0, 3), torch.float32).shape == (0, 3)
    block.give_back()
