"""Every shipped model at 8, 16, 64 and 512 devices: longest context and modelled step of three programs.

`python -m benchmarks.case_planner` writes the tables of `docs/plans.md`: arithmetic, alike on every machine. Timed are
the answers of the command line only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from steppe.core import parameters
from steppe.core.shapes import BatchShape, MachineShape
from steppe.core.units import GiB, format_tokens
from steppe.planner.context import LONGEST, Context, in_words, max_context, max_context_plain
from steppe.planner.layouts import Job
from steppe.planner.models import load_model, shipped_models
from steppe.planner.search import search, search_plain, switches

CASE = "planner"
TESTS = "tests/planner"
WORLDS = (8, 16, 64, 512)
LENGTHS = (32 * 1024, 128 * 1024, 512 * 1024, 1024 * 1024)
PAPER = {"paper-120b": 16, "paper-241b": 32, "paper-667b": 64}
PAGE = Path(__file__).parents[1] / "docs" / "plans.md"
MACHINE = MachineShape(
    device_memory_bytes=141 * 10**9 - 2 * GiB, host_memory_bytes=2 * 10**12, to_host_rate=50e9, to_device_rate=50e9,
    network_rate=50e9, host_memory_rate=300e9, adamw_rate=300e9 / 28, matmul_rate=400e12,
)  # fmt: skip
# Chunked cross-entropy and CPU offload, taken as free: no logits at all, nothing of the parameters on the device.
TUNED = frozenset({
    "log-softmax", "gradient of the log-softmax", "gradient of the logits", "logits, held by the caller",
    "weights of the shards", "gradients of the shards", "gradients of the shards so far", "exp_avg", "exp_avg_sq",
    "master weights", "foreach transient",
})  # fmt: skip

FUSED = frozenset({"foreach transient"})
HEAVY = ("torch", "transformers", "matplotlib")
ANSWERS: tuple[tuple[str, ...], ...] = (
    ("plan", "paper-667b", "--seq-len", "1M", "--ranks", "64", "--device-memory", "141GB", "--host-memory", "2TB"),
    ("plan", "qwen3-30b-a3b", "--seq-len", "128K", "--ranks", "16", "--device-memory", "80GB"),
    ("explain", "37.09 GiB", "qwen3-0.6b", "--seq-len", "65536"),
)


def job(name: str, world: int, seq_len: int = 128 * 1024) -> Job:
    """Batch 1, bf16 weights with float32 state, a fused attention kernel for every model."""
    return Job(load_model(name), BatchShape(seq_len), world, machine=MACHINE, attention="fused")


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """How long an answer takes; and one row a model and number of devices: longest contexts in tokens, 0 where nothing
    fits."""
    for command in ANSWERS:
        yield {"label": " ".join(command[:2]), **seconds_of(command, rounds=3 if quick else 7)}
    yield from context_rows(quick)


def context_rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Longest contexts of every model and number of devices."""
    for name in shipped_models()[:2] if quick else shipped_models():
        for world in WORLDS[:2] if quick else WORLDS:
            yield {"label": f"{name} x {world}", "model": name, "ranks": world, **contexts(name, world)}


def seconds_of(command: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """Wall seconds of `steppe ...` with the start of the interpreter, their median, and what heavy it loaded."""
    probe = (
        "import sys; from steppe import cli\n"
        f"code = cli.main({list(command)!r})\n"
        f"print(code, *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    times, loaded = [], ""
    for _ in range(rounds):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - started)
        loaded = done.stderr.splitlines()[-1].removeprefix("0").strip()
    return {"seconds": round(median(times), 3), "rounds": rounds, "loaded": loaded}


def contexts(name: str, world: int) -> dict[str, Any]:
    asked = job(name, world)
    sides = {
        "naive": max_context_plain(asked),
        "fused": max_context_plain(replace(asked, without=FUSED)),
        "tuned": tuned_plain(asked),
        "flattened": max_context(asked),
    }
    found: dict[str, Any] = {}
    for side, context in sides.items():
        found |= {side: context.num_tokens, f"{side}_stopped_by": context.stopped_by}
    return found


def tuned_plain(asked: Job) -> Context:
    """Plain with chunked cross-entropy and everything of the parameters on the host, if a node's memory holds it."""
    shard = parameters.parameters_per_rank(asked.model, asked.world)
    a_parameter = asked.dtypes.weight_bytes + asked.dtypes.gradient_bytes + 3 * asked.dtypes.state_bytes
    if shard * a_parameter * min(asked.ranks_per_node, asked.world) > asked.machine.host_memory_bytes:
        return Context(0, "host memory", 0)
    return max_context_plain(replace(asked, without=TUNED))


def _tokens(count: int, stopped_by: str) -> str:
    if not count:
        return f"- ({in_words(stopped_by)})"
    rounded = count // 1024 * 1024
    return (
        f"{format_tokens(rounded)} or more"
        if count >= LONGEST
        else f"{format_tokens(rounded)} ({in_words(stopped_by)})"
    )


def context_table() -> Iterator[str]:
    yield "| model | devices | naive plain | plain, fused AdamW | tuned plain | flattened | over fused | over tuned |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in context_rows(quick=False):
        cells = [_tokens(row[side], row[f"{side}_stopped_by"]) for side in ("naive", "fused", "tuned", "flattened")]
        gains = [f"{row['flattened'] / row[side]:.1f}x" if row[side] else "" for side in ("fused", "tuned")]
        yield f"| {row['model']} | {row['ranks']} | {' | '.join([*cells, *gains])} |"


def length_table() -> Iterator[str]:
    """The published models at four lengths: device peak and modelled step of plain and flattened, AdamW fused."""
    yield "| model, devices | S | plain peak | plain step | flattened peak | headroom | flattened step | on |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, world in PAPER.items():
        for seq_len in LENGTHS:
            asked = replace(job(name, world, seq_len), without=FUSED)
            plain, flat = search_plain(asked), search(asked)
            peaks = [c.forecast.device_peak_bytes / GiB for c in (plain, flat)]
            step = f"{plain.time.seconds:.1f} s" if plain.fits else "doesn't fit"
            on = ", ".join(s.flattener for s in switches(asked, flat) if s.on) or "none"
            room = MACHINE.device_memory_bytes / GiB - peaks[1]
            yield (
                f"| {name}, {world} | {format_tokens(seq_len)} | {peaks[0]:.1f} GiB | {step} | {peaks[1]:.1f} GiB | "
                f"{room:.1f} GiB | {flat.time.seconds:.1f} s | {on} |"
            )


def write_page() -> None:
    """Replace what stands between the markers of `docs/plans.md`."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, table in (("contexts", context_table()), ("lengths", length_table())):
        begin, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = head + begin + "\n".join(table) + "\n" + end + tail
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()
