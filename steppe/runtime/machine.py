"""What this machine is: links, host memory, AdamW, GEMM, NUMA nodes, page-lock limit. Measured once, kept in TOML.

Reading the file needs no torch, so the planner can; measuring loads torch for the GEMM and the link. A rate that this
machine can't show (a link without an accelerator) is left out, and the reader keeps the prior.
"""

from __future__ import annotations

import os
import resource
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from steppe.core.errors import ConfigError
from steppe.core.shapes import MachineShape
from steppe.core.units import MiB, format_bytes

NODES: Final = Path("/sys/devices/system/node")
TILE: Final = 1 << 14  # elements of a cache-sized tile
_MOST: Final = 10**20  # of any figure: a limit of memory may be as large as 2^64
Update = Callable[[int, int], float]  # (parameters, threads) -> seconds of one AdamW pass


@dataclass(frozen=True)
class Measured:
    """What `calibrate` found; None or empty where this machine can't show it."""

    to_host_rate: float | None = None
    to_device_rate: float | None = None
    host_memory_rate: float | None = None
    far_memory_rate: float | None = None  # read by the first NUMA node from the second
    matmul_rate: float | None = None
    adamw_rates: Mapping[str, float] = field(default_factory=dict)  # threads -> parameters per second
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    numa_nodes: int = 1
    page_lock_bytes: int | None = None
    threads: int = 1

    def shape(self, base: MachineShape | None = None) -> MachineShape:
        """`base` (the priors) with every measured figure in its place."""
        known = {f.name for f in fields(MachineShape)}
        found = {k: v for k, v in asdict(self).items() if k in known and v is not None}
        if self.adamw_rates:
            found["adamw_rate"] = max(self.adamw_rates.values())
        return replace(base or MachineShape(), **found)


def calibrate(*, seconds: float = 2.0, update: Update | None = None) -> Measured:
    """Measure this machine in well under a minute; each rate is the best of passes that take `seconds` together.

    `update` times one AdamW pass of a native kernel; without it the same arithmetic runs in numpy tiles.
    """
    threads = usable_threads()
    counts = sorted({1, max(1, threads // 2), threads})
    links = link_rates(seconds)
    return Measured(
        **links,
        host_memory_rate=memory_rate(threads, seconds),
        far_memory_rate=far_memory_rate(seconds),
        matmul_rate=matmul_rate(seconds),
        adamw_rates={str(n): adamw_rate(n, seconds, update or numpy_update) for n in counts},
        host_memory_bytes=host_memory_bytes(),
        numa_nodes=len(numa_cpus()),
        page_lock_bytes=page_lock_bytes(),
        threads=threads,
    )


def save(measured: Measured, path: str | Path) -> None:
    """Write the figures as TOML. Raises: ConfigError when tomli-w isn't installed."""
    table = {key: value for key, value in asdict(measured).items() if value not in (None, {})}
    Path(path).write_text(_toml_writer().dumps({"machine": table}), encoding="utf-8")


def _toml_writer() -> ModuleType:
    try:
        import tomli_w
    except ImportError as missing:
        raise ConfigError(
            "writing TOML", got="tomli-w is not installed", allowed="tomli-w >= 1.1",
            remedy="pip install tomli-w, or pip install 'steppe[train]'",
        ) from missing  # fmt: skip
    return tomli_w


def load(path: str | Path) -> Measured:
    """Read what `save` wrote. Raises: ConfigError for a file that isn't that."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("machine")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "machine file", got=f"{path}: {error}", allowed="TOML", remedy="run steppe calibrate"
        ) from error
    allowed = [f.name for f in fields(Measured)]
    if not isinstance(table, dict) or set(table) - set(allowed):
        found = sorted(set(table) - set(allowed)) if isinstance(table, dict) else f"machine = {table!r}"
        raise ConfigError(
            "machine file", got=f"{path}: {'no [machine]' if table is None else found}",
            allowed="[machine] with " + ", ".join(allowed), remedy="run steppe calibrate",
        )  # fmt: skip
    _check_figures(path, table)
    return Measured(**table)


def _check_figures(path: str | Path, table: Mapping[str, Any]) -> None:
    """Raises: ConfigError for a figure that no machine has; such a file was edited."""
    rates = table.get("adamw_rates", {})
    figures = {name: value for name, value in table.items() if name != "adamw_rates"}
    named = rates if isinstance(rates, dict) else {"": rates}
    figures |= {f"adamw_rates.{threads}": rate if named is rates else None for threads, rate in named.items()}
    for name, value in figures.items():
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= _MOST
        if not good and not (name == "page_lock_bytes" and value == 0):
            raise ConfigError(
                "machine file", got=f"{path}: {name} = {value!r}", allowed=f"finite numbers above 0, 1 to {_MOST:.0e}",
                remedy="run steppe calibrate again, or leave the line out",
            )  # fmt: skip


def calibrate_command(out: Path, update: Update | None = None) -> int:
    """`steppe calibrate`: measure, write the TOML file, print what was found."""
    _toml_writer()  # refused before the minute of measuring, not after it
    measured = calibrate(update=update)
    save(measured, out)
    print("\n".join((*describe(measured), f"written to {out}")))
    return 0


def describe(measured: Measured) -> Iterable[str]:
    """The figures, one a line."""
    if measured.to_host_rate is None:
        yield "link: no accelerator here; the planner keeps its prior of 16 GB/s each way"
    else:
        assert measured.to_device_rate is not None
        yield f"link: {measured.to_host_rate / 1e9:.1f} GB/s to the host, {measured.to_device_rate / 1e9:.1f} GB/s back"
    if measured.host_memory_rate is not None:
        yield f"host memory: {measured.host_memory_rate / 1e9:.1f} GB/s with {measured.threads} threads"
    if measured.far_memory_rate is not None:
        yield f"host memory across sockets: {measured.far_memory_rate / 1e9:.1f} GB/s"
    if measured.matmul_rate is not None:
        yield f"GEMM: {measured.matmul_rate / 1e12:.2f} TFLOP/s"
    for threads, rate in measured.adamw_rates.items():
        yield f"AdamW: {rate / 1e6:.0f} M parameters/s with {threads} thread(s)"
    limit = "unlimited" if measured.page_lock_bytes is None else format_bytes(measured.page_lock_bytes)
    yield f"NUMA nodes: {measured.numa_nodes}; page-lock limit: {limit}"


def usable_threads() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def numa_cpus() -> tuple[frozenset[int], ...]:
    """The CPUs of each NUMA node that this process may use; one node where the system says nothing."""
    allowed = os.sched_getaffinity(0)
    nodes = [_cpu_list(path.read_text()) & allowed for path in sorted(NODES.glob("node[0-9]*/cpulist"))]
    return tuple(frozenset(node) for node in nodes if node) or (frozenset(allowed),)


def _cpu_list(text: str) -> set[int]:
    """`"0-3,8"` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def page_lock_bytes() -> int | None:
    """`ulimit -l` in bytes; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_rate(threads: int, seconds: float, *, num_bytes: int = 64 * MiB) -> float:
    """Bytes per second of copies on all threads, what is read and what is written both counted."""
    return 2 * num_bytes * threads / _best(_copies(num_bytes, [None] * threads), seconds)


def far_memory_rate(seconds: float, *, num_bytes: int = 64 * MiB) -> float | None:
    """The same on the first node's CPUs from memory that the second node touched first; None with one node."""
    nodes = numa_cpus()
    if len(nodes) < 2:
        return None
    near = [frozenset({cpu}) for cpu in sorted(nodes[0])]
    return 2 * num_bytes * len(near) / _best(_copies(num_bytes, near, first_touch=nodes[1]), seconds)


def _copies(
    num_bytes: int, pins: Sequence[frozenset[int] | None], *, first_touch: frozenset[int] | None = None
) -> Callable[[], object]:
    import numpy as np

    buffers: list[Any] = []

    def touch() -> None:
        for _ in pins:
            buffers.append((np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)))

    _run([(first_touch, touch)])
    jobs = [(pin, partial(np.copyto, *pair)) for pin, pair in zip(pins, buffers, strict=True)]
    return lambda: _run(jobs)


def adamw_rate(threads: int, seconds: float, update: Update, *, count: int = 1 << 21) -> float:
    """Parameters per second of one node's AdamW pass on this many threads."""
    return count * threads / min(update(count * threads, threads) for _ in _rounds(seconds))


def numpy_update(count: int, threads: int) -> float:
    """Seconds of one AdamW pass over `count` parameters in numpy, in cache-sized tiles on `threads` threads."""
    import numpy as np

    each = count // threads
    states = [tuple(np.ones(each, np.float32) for _ in range(4)) for _ in range(threads)]
    start = time.perf_counter()
    _run([(None, partial(_numpy_pass, np, state)) for state in states])
    return time.perf_counter() - start


def _numpy_pass(np: Any, state: tuple[Any, ...]) -> None:
    for begin in range(0, len(state[0]), TILE):
        p, m, v, g = (array[begin : begin + TILE] for array in state)
        m += np.float32(0.1) * (g - m)
        v *= np.float32(0.95)
        v += np.float32(0.05) * g * g
        p -= np.float32(1e-3) * m / (np.sqrt(v) + np.float32(1e-8))


def matmul_rate(seconds: float) -> float:
    """Operations per second of a square bf16 GEMM on the accelerator, or a float32 one on the CPU."""
    import torch

    device = _accelerator()
    side, dtype = (8192, torch.bfloat16) if device is not None else (1024, torch.float32)
    a = torch.ones(side, side, dtype=dtype, device=device or "cpu")
    return 2 * side**3 / _best(_synchronised(lambda: a @ a, device), seconds)


def link_rates(seconds: float, *, num_bytes: int = 256 * MiB) -> dict[str, Any]:
    """Page-locked copies both ways and the device's memory; empty without an accelerator."""
    import torch

    device = _accelerator()
    if device is None:
        return {}
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    to_host = _synchronised(lambda: on_host.copy_(on_device, non_blocking=True), device)
    to_device = _synchronised(lambda: on_device.copy_(on_host, non_blocking=True), device)
    return {
        "to_host_rate": num_bytes / _best(to_host, seconds),
        "to_device_rate": num_bytes / _best(to_device, seconds),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }


def _accelerator() -> Any | None:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _synchronised(work: Callable[[], object], device: Any | None) -> Callable[[], object]:
    if device is None:
        return work
    import torch

    def run() -> None:
        work()
        torch.cuda.synchronize(device)

    return run


def _run(jobs: Sequence[tuple[frozenset[int] | None, Callable[[], object]]]) -> None:
    """Run jobs beside each other, each on the CPUs it names; the caller's own affinity stays."""

    def body(pin: frozenset[int] | None, job: Callable[[], object]) -> None:
        if pin is not None:
            os.sched_setaffinity(0, pin)
        job()

    threads = [threading.Thread(target=body, args=each) for each in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _best(work: Callable[[], object], seconds: float) -> float:
    """The shortest of the rounds that fit into `seconds`, one more for warming up."""
    work()
    times = []
    for _ in _rounds(seconds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _rounds(seconds: float, *, least: int = 3) -> Iterable[int]:
    """Count rounds until `seconds` have passed, at least `least` of them."""
    end, done = time.perf_counter() + seconds, 0
    while done < least or time.perf_counter() < end:
        yield done
        done += 1
