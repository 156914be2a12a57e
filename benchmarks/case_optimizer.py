"""OffloadStreamAdamW: rates against the serial offload, torch's fused step and DeepSpeedCPUAdam; overlap; threads.

All candidates of a row alternate in one run, and the ratios are what counts. DeepSpeedCPUAdam (the `bench` extra)
compiles its kernel at first use; where it can't, the row says so. On a CUDA machine the link rows are real.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.timing import interleaved
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.crew import numa_nodes, process_cpus
from steppe.flatteners.optimizer.engine import Wiring
from steppe.flatteners.optimizer.pipeline import Lines
from steppe.flatteners.optimizer.reference import Adam, SerialOffload, state_of, step
from steppe.runtime.lanes import open_lane

CASE = "optimizer"
TESTS = "tests/flatteners/optimizer"
CPU = torch.device("cpu")
CLIP = 1.0


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    count = 4 * 2**20 if quick else 64 * 2**20
    rounds = 3 if quick else 9
    yield _against_serial(count, rounds)
    yield _against_fused(count, rounds)
    yield _against_deepspeed(count, rounds)
    yield _with_norm(count, rounds)
    yield _overlapped(count, rounds)
    yield from _by_threads(count, rounds)
    yield from _throttled(quick)
    yield from (_error(steps) for steps in (1, 10, 200))


def _parameters(count: int, dtype: torch.dtype, device: torch.device = CPU) -> list[torch.nn.Parameter]:
    """Matrices of 16 M elements and a few norms, with gradients."""
    random_numbers = torch.Generator().manual_seed(0)
    sizes = [min(2**24, count)] * max(1, count // 2**24) + [4096] * 8
    held = [torch.nn.Parameter(torch.randn(n, generator=random_numbers).to(dtype).to(device)) for n in sizes]
    for parameter in held:
        parameter.grad = torch.randn(parameter.shape, generator=random_numbers).to(dtype).to(device)
    return held


def _row(label: str, count: int, timed: dict[str, Any], **more: Any) -> dict[str, Any]:
    rates = {name: round(count / ms / 1e3, 1) for name, ms in timed["times_ms"].items()}
    return {"case": CASE, "label": label, "parameters": count, "million_per_second": rates, **timed, **more}


def _speedup(timed: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as the baseline each candidate is."""
    return {name: round(1 / ratio, 3) for name, ratio in timed["ratio"].items()}


def _against_serial(count: int, rounds: int) -> dict[str, Any]:
    plain = SerialOffload(_parameters(count, torch.bfloat16), lr=1e-3, fused=True)
    ours = OffloadStreamAdamW(_parameters(count, torch.bfloat16), lr=1e-3)
    timed = interleaved({"serial offload": plain.step, "steppe": ours.step}, rounds=rounds)
    return _row(
        "serial offload, bf16", count, timed, speedup=_speedup(timed), target=2.5, kernel=ours.stats()["kernel"]
    )


def _against_fused(count: int, rounds: int) -> dict[str, Any]:
    fused = torch.optim.AdamW(_parameters(count, torch.float32), lr=1e-3, fused=True)
    narrow = OffloadStreamAdamW(_parameters(count, torch.bfloat16), lr=1e-3)
    wide = OffloadStreamAdamW(_parameters(count, torch.float32), lr=1e-3)
    timed = interleaved(
        {"torch fused fp32": fused.step, "steppe bf16": narrow.step, "steppe fp32": wide.step}, rounds=rounds
    )
    return _row("torch._fused_adamw_ on fp32", count, timed, speedup=_speedup(timed), target=0.95)


def _against_deepspeed(count: int, rounds: int) -> dict[str, Any]:
    label = "DeepSpeedCPUAdam"
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs = [DeepSpeedCPUAdam(_parameters(count, d), lr=1e-3) for d in (torch.bfloat16, torch.float32)]
    except Exception as failure:  # not installed, or its kernel can't be compiled here
        return {"case": CASE, "label": label, "parameters": count, "not measured": repr(failure)[:300]}
    ours = [OffloadStreamAdamW(_parameters(count, d), lr=1e-3) for d in (torch.bfloat16, torch.float32)]
    bf16 = interleaved({"DeepSpeedCPUAdam": theirs[0].step, "steppe": ours[0].step}, rounds=rounds)
    fp32 = interleaved({"DeepSpeedCPUAdam": theirs[1].step, "steppe": ours[1].step}, rounds=rounds)
    same = interleaved(
        {"DeepSpeedCPUAdam on masters": _with_masters(DeepSpeedCPUAdam, count), "steppe": ours[0].step}, rounds=rounds
    )
    return {
        "case": CASE, "label": label, "parameters": count, "bf16": bf16, "fp32": fp32, "bf16, float32 masters": same,
        "speedup": {"bf16": _speedup(bf16)["steppe"], "fp32": _speedup(fp32)["steppe"],
                    "bf16, float32 masters": _speedup(same)["steppe"]},
        "target": {"bf16": 2.5, "fp32": 1.0},
        "note": "on bf16 DeepSpeedCPUAdam keeps no master: 22 bytes of traffic a parameter against 28",
    }  # fmt: skip


def _with_masters(kind: Callable[..., torch.optim.Optimizer], count: int) -> Callable[[], None]:
    """The same arithmetic with DeepSpeed's kernel: float32 masters and gradients beside bf16 parameters."""
    held = _parameters(count, torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in held]
    optimizer = kind(masters, lr=1e-3)

    @torch.no_grad()
    def step() -> None:
        for master, parameter in zip(masters, held):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
        optimizer.step()
        for master, parameter in zip(masters, held):
            parameter.copy_(master)

    return step


def _with_norm(count: int, rounds: int) -> dict[str, Any]:
    plain = OffloadStreamAdamW(_parameters(count, torch.bfloat16))
    clipped = OffloadStreamAdamW(_parameters(count, torch.bfloat16), max_norm=CLIP)
    timed = interleaved({"without norm": plain.step, "clipped": clipped.step}, rounds=rounds)
    return _row("what exact clipping costs, bf16", count, timed)


def _overlapped(count: int, rounds: int) -> dict[str, Any]:
    """Only the step: with overlap the gradients are summed on the host already, in float32."""
    plain = OffloadStreamAdamW(_parameters(count, torch.bfloat16), max_norm=math.inf)
    overlapped = OffloadStreamAdamW(_parameters(count, torch.bfloat16), max_norm=math.inf, overlap_backward=True)
    overlapped.materialize()
    gradients = [p.grad for p in overlapped.param_groups[0]["params"]]

    def arrive_and_step() -> None:
        for parameter, gradient in zip(overlapped.param_groups[0]["params"], gradients):
            parameter.grad = gradient
        overlapped.step()

    timed = interleaved({"after backward": plain.step, "arrival and step": arrive_and_step}, rounds=rounds)
    return _row("gradients through the host sums, bf16", count, timed)


def _by_threads(count: int, rounds: int) -> Iterator[dict[str, Any]]:
    cpus = process_cpus()
    held = {
        f"{n} threads": OffloadStreamAdamW(_parameters(count, torch.bfloat16), threads=n) for n in _powers(len(cpus))
    }
    timed = interleaved({name: optimizer.step for name, optimizer in held.items()}, rounds=rounds)
    yield _row("threads, bf16", count, timed, speedup=_speedup(timed))
    nodes = len(numa_nodes())
    if nodes < 2:
        yield {"case": CASE, "label": "same and cross socket", "not measured": f"{nodes} NUMA node on this machine"}
        return
    local = OffloadStreamAdamW(_parameters(count, torch.bfloat16), streams=nodes)
    across = OffloadStreamAdamW(_parameters(count, torch.bfloat16), streams=1)
    timed = interleaved({"one stream across": across.step, "a stream a node": local.step}, rounds=rounds)
    yield _row("same and cross socket", count, timed)


def _powers(most: int) -> list[int]:
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


def _throttled(quick: bool) -> Iterator[dict[str, Any]]:
    """A link of given bandwidth, simulated by lanes that take as long; a bucket's seconds in each stage."""
    buckets = 6 if quick else 24
    for name, stage_s in (("equal stages", (0.03, 0.03, 0.03)), ("slow download", (0.03, 0.01, 0.01)),
                          ("slow update", (0.01, 0.03, 0.01)), ("slow upload", (0.01, 0.01, 0.03))):  # fmt: skip
        taken = min(_throttled_step(stage_s, buckets) for _ in range(3))
        slowest, serial = max(stage_s), buckets * sum(stage_s)
        bound = buckets * slowest + sum(stage_s) - slowest
        yield {
            "case": CASE, "label": f"throttled lanes, {name}", "buckets": buckets, "stage_s": stage_s,
            "step_s": round(taken, 4), "over_slowest_stage_fill_and_drain": round(taken / bound, 4),
            "speedup_over_serial": round(serial / taken, 3), "target": {"over": 1.1, "equal stages": 2.05},
        }  # fmt: skip


def _throttled_step(stage_s: Sequence[float], buckets: int) -> float:
    bucket_bytes = 64 * 1024
    elements = bucket_bytes // 4
    rates = (bucket_bytes / stage_s[0], bucket_bytes / stage_s[2], elements / stage_s[1])

    def lines(_: torch.device) -> Lines:
        down, up, work = (open_lane(n, CPU, rate=r) for n, r in zip(("gradients", "parameters", "adamw 0"), rates))
        return Lines(down, up, (work,))

    held = torch.nn.Parameter(torch.zeros(elements * buckets))
    optimizer = OffloadStreamAdamW([held], bucket_bytes=bucket_bytes, wiring=Wiring(open_lines=lines))
    optimizer.materialize()
    held.grad = torch.zeros_like(held)
    started = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - started


def _error(steps: int) -> dict[str, Any]:
    """Relative error of the masters against float64, ours and torch.optim.AdamW's in float32, bf16 parameters."""
    held = [_parameters(2**14, torch.bfloat16) for _ in range(2)]
    ours, plain = OffloadStreamAdamW(held[0], lr=1e-2), SerialOffload(held[1], lr=1e-2)
    truth = [state_of(p, np.float64) for p in held[0]]
    for _ in range(steps):
        ours.step()
        plain.step()
        for state, parameter in zip(truth, held[0]):
            assert parameter.grad is not None
            step(state, parameter.grad, Adam(lr=1e-2))
    exact = torch.cat([torch.from_numpy(state.master) for state in truth])
    masters = {
        "steppe": torch.cat([ours.state[p]["master"] for p in held[0]]),
        "torch.optim.AdamW": torch.cat([master.detach() for master in plain.masters]),
    }
    error = {name: float((m.double() - exact).norm() / exact.norm()) for name, m in masters.items()}
    return {"case": CASE, "label": f"error against float64 after {steps} steps", "relative_error": error}


def gpu_rows() -> Iterator[dict[str, Any]]:
    count, rounds = 64 * 2**20, 9
    device = torch.device("cuda", 0)
    serial = SerialOffload(_parameters(count, torch.bfloat16, device), lr=1e-3, fused=True)
    settings: dict[str, dict[str, Any]] = {"steppe host": {}, "steppe device": {"update": "device"}}
    ours = {n: OffloadStreamAdamW(_parameters(count, torch.bfloat16, device), **s) for n, s in settings.items()}
    candidates: dict[str, Callable[[], object]] = {"serial offload": serial.step}
    timed = interleaved(candidates | {name: each.step for name, each in ours.items()}, rounds=rounds)
    link_gb = {"steppe host": 4 * count / 1e9, "steppe device": 24 * count / 1e9}
    rate = {name: round(gb / (timed["times_ms"][name] / 1e3), 2) for name, gb in link_gb.items()}
    yield _row("CUDA, serial offload", count, timed, speedup=_speedup(timed), link_gb_per_second_both_ways=rate)
