"""The CPU allocator's peak for runs that are too long for recorded events: `heap.c`, built here and preloaded.

A step of many chunks makes millions of profiler events, some GB of them; this counts as they happen. It sees every
aligned allocation of the process on every thread, so scratch memory of libraries counts too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from steppe.runtime.storages import host_declarations

_LIBRARY = Path(tempfile.gettempdir()) / f"steppe-heap-{os.getuid()}.so"


@contextmanager
def preloaded() -> Iterator[None]:
    """Processes started inside count their heap. Raises: CalledProcessError without a C compiler."""
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", _LIBRARY, source, "-lpthread"], check=True)
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(_LIBRARY)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_PRELOAD"]
        else:
            os.environ["LD_PRELOAD"] = before


def heap_peak(fn: Callable[[], object]) -> int:
    """The most bytes alive while `fn` runs in a process with the counter, above those of before; host arenas left out.

    Raises: AttributeError in a process that was started without the counter.
    """
    counter = ctypes.CDLL(None)
    counter.steppe_heap_reset.restype = counter.steppe_heap_peak.restype = ctypes.c_int64
    counter.steppe_heap_host.argtypes = [ctypes.c_void_p]
    gc.collect()  # what dies meanwhile would count as negative
    base = counter.steppe_heap_reset()
    with host_declarations(lambda storage: counter.steppe_heap_host(storage.data_ptr())):
        fn()
    return int(counter.steppe_heap_peak() - base)
