"""Arenas: exact-size host blocks, lent and returned.

Blocks are allocated and first touched once, page-locked when an accelerator is there, and never rounded up to a power
of two. A block keeps its exact size for life and is lent again to whoever asks for that size.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from steppe.core.errors import HostMemoryError, SteppeError
from steppe.core.units import format_bytes
from steppe.runtime.storages import declare_host

_POISON = 0xFF  # every float type reads 0xFF.. as NaN


def free_host_bytes() -> int:
    """Bytes of host memory that can be allocated now: the system's estimate, cut by the container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return max(0, free)


def page_lock_limit_bytes() -> int | None:
    """The soft limit of `ulimit -l` in bytes; None when unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class Block:
    """Exactly `num_bytes` of host memory, lent for `what`."""

    def __init__(self, arena: Arena, storage: torch.Tensor) -> None:
        self._arena, self._storage = arena, storage
        self.num_bytes = storage.numel()
        self.what = ""
        self.lent = False

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The block's first elements as a contiguous CPU tensor of this shape and dtype."""
        if not self.lent:
            raise SteppeError(f"arena {self._arena.name!r}: a block of {self.num_bytes} bytes is used while not lent")
        needed = math.prod(shape) * dtype.itemsize
        if needed > self.num_bytes:
            raise SteppeError(f"arena {self._arena.name!r}: {needed} bytes wanted of a block of {self.num_bytes}")
        return self._storage[:needed].view(dtype).view(tuple(shape))

    def give_back(self) -> None:
        """Return the block; returning it twice is an error."""
        self._arena._take_back(self)


class Arena:
    """A cap in bytes, and the blocks under it.

    `pin=None` page-locks when an accelerator is there; `pin=False` is pageable memory as a declared choice.
    `poison=True` fills blocks with NaN when they are lent and when they come back (for tests).
    Peak: `reserved_bytes`, the exact sum of the blocks' sizes.
    Raises: HostMemoryError when the cap, free host memory or the page-lock limit don't allow a block.
    """

    def __init__(self, name: str, cap_bytes: int | None = None, *, pin: bool | None = None, poison: bool = False):
        self.name, self.cap_bytes, self.poison = name, cap_bytes, poison
        self.pin = torch.accelerator.is_available() if pin is None else pin
        self.lent_bytes = self.reserved_bytes = self.high_water_bytes = 0
        self._free: dict[int, list[Block]] = {}
        self._lock = threading.RLock()  # blocks come back from finalizers, which may run inside `lend`
        self._closed = False

    def reserve(self, num_bytes: int, count: int = 1) -> None:
        """Allocate and first touch `count` blocks of `num_bytes` ahead of time."""
        self._check_room(num_bytes * count)
        with self._lock:
            self._free.setdefault(num_bytes, []).extend(self._allocate(num_bytes) for _ in range(count))

    def lend(self, num_bytes: int, what: str) -> Block:
        """A block of exactly `num_bytes`; allocates one when none of that size is free."""
        if self._closed:
            raise SteppeError(f"arena {self.name!r} is closed")
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                block = free.pop()
            else:
                self._check_room(num_bytes)
                block = self._allocate(num_bytes)
            block.lent, block.what = True, what
            self.lent_bytes += num_bytes
            self.high_water_bytes = max(self.high_water_bytes, self.lent_bytes)
        if self.poison:
            block._storage.fill_(_POISON)
        return block

    def close(self) -> None:
        """Drop every free block; blocks still lent live until they come back."""
        with self._lock:
            self._closed = True
            for blocks in self._free.values():
                self.reserved_bytes -= sum(block.num_bytes for block in blocks)
            self._free.clear()

    def _take_back(self, block: Block) -> None:
        with self._lock:
            if not block.lent:
                raise SteppeError(f"arena {self.name!r}: a block of {block.num_bytes} bytes came back twice")
            block.lent = False
            self.lent_bytes -= block.num_bytes
            if self.poison:
                block._storage.fill_(_POISON)
            if self._closed:
                self.reserved_bytes -= block.num_bytes
            else:
                self._free.setdefault(block.num_bytes, []).append(block)

    def _check_room(self, num_bytes: int) -> None:
        if self.cap_bytes is not None and self.reserved_bytes + num_bytes > self.cap_bytes:
            missing = self.reserved_bytes + num_bytes - self.cap_bytes
            raise HostMemoryError(
                f"host arena {self.name!r}",
                got=f"{format_bytes(self.reserved_bytes + num_bytes)} wanted, {missing:,} bytes too many",
                allowed=f"{format_bytes(self.cap_bytes)} (its cap)", remedy="raise the cap or offload less",
            )  # fmt: skip
        free = free_host_bytes()
        if num_bytes > free:
            raise HostMemoryError(
                f"host arena {self.name!r}",
                got=f"{format_bytes(num_bytes)} wanted, {num_bytes - free:,} bytes more than there are",
                allowed=f"{format_bytes(free)} of free host memory",
                remedy="use fewer ranks per node, a smaller batch, or a machine with more host memory",
            )  # fmt: skip

    def _allocate(self, num_bytes: int) -> Block:
        # A plain tensor outside inference mode: a buffer born in inference mode could not be written later.
        with torch.inference_mode(False):
            storage = pinned_bytes(num_bytes, self.name) if self.pin else torch.empty(num_bytes, dtype=torch.uint8)
            touch(storage)
        self.reserved_bytes += num_bytes
        return Block(self, declare_host(storage, self.name))


def touch(storage: torch.Tensor) -> None:
    """Write every page once, so that the memory exists from now on and lies near the thread that wrote it."""
    storage.fill_(0)


def pinned_bytes(num_bytes: int, name: str) -> torch.Tensor:
    """Exactly `num_bytes` of page-locked memory as a uint8 tensor.

    torch's own pinned allocator rounds up to a power of two, so an anonymous mapping is registered in place with the
    CUDA runtime; other accelerators use their pinned allocator. Raises HostMemoryError when the limit is too low.
    """
    limit = page_lock_limit_bytes()
    if limit is not None and num_bytes > limit:
        raise HostMemoryError(
            f"page-locked memory of arena {name!r}",
            got=f"{format_bytes(num_bytes)}, {num_bytes - limit:,} bytes over the limit",
            allowed=f"{format_bytes(limit)} (ulimit -l)",
            remedy="raise it (ulimit -l unlimited, LimitMEMLOCK=infinity) or choose pageable memory: pin=False",
        )  # fmt: skip
    if not torch.cuda.is_available():
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    storage = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    touch(storage)
    code = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), num_bytes, 0))
    if code != 0:
        raise HostMemoryError(
            f"page-locked memory of arena {name!r}", got=f"cudaHostRegister refused {format_bytes(num_bytes)} ({code})",
            allowed="what the driver and ulimit -l permit", remedy="raise ulimit -l or choose pin=False",
        )  # fmt: skip
    return storage
