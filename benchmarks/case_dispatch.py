"""Expert dispatch: PipelinedLLEP against saving everything and against checkpointing it, on one rank and over ranks."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.timing import interleaved
from steppe.core.units import MiB
from steppe.flatteners.dispatch.budget import DispatchPolicy, LayerShape, cost
from steppe.flatteners.dispatch.exchange import pipelined_llep
from steppe.flatteners.dispatch.plan import plan_experts
from steppe.flatteners.dispatch.profiles import forced_counts, forced_routes
from steppe.flatteners.dispatch.reference import (
    checkpointed,
    plain_expert_parallel,
    plain_experts,
    whole_batch_llep,
)
from steppe.flatteners.dispatch.routes import Session
from steppe.flatteners.dispatch.schedule import lay_out, receive_tables, send_tables
from steppe.flatteners.dispatch.weights import ExpertWeights
from steppe.flatteners.dispatch.workspace import WorkspacePool
from steppe.runtime import collectives
from steppe.runtime.allocator import allocator_peak

CASE = "dispatch"
TESTS = "tests/flatteners/dispatch"
Program = Callable[..., torch.Tensor]


class Layer:
    """Tensors of one MoE layer on one rank; `step(program)` is a forward and a backward."""

    def __init__(
        self, profile: str, *, tokens: int, hidden: int, width: int, experts: int, choices: int, natives: int,
        dtype: torch.dtype = torch.float32, device: str = "cpu",
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        draw = functools.partial(torch.randn, dtype=dtype, device=device)
        self.weights = ExpertWeights(
            draw(natives, 2 * width, hidden).mul_(0.05).requires_grad_(),
            draw(natives, hidden, width).mul_(0.05).requires_grad_(),
        )
        self.tokens = draw(tokens, hidden).requires_grad_()
        ids = forced_routes(profile, num_tokens=tokens, num_experts=experts, num_choices=choices)
        self.ids = torch.from_numpy(ids).to(device)
        self.route_weights = torch.full(ids.shape, 1 / choices, dtype=dtype, device=device).requires_grad_()
        self.upstream = draw(tokens, hidden)

    def step(self, program: Program) -> None:
        self.clear()
        program(self.tokens, self.ids, self.route_weights, self.weights).backward(self.upstream)

    def clear(self) -> None:
        for tensor in (self.tokens, self.route_weights, *self.weights.tensors):
            tensor.grad = None

    def peak_bytes(self, program: Program) -> int:
        """Bytes above inputs and upstream gradient, by the allocator's events."""
        self.step(program)
        self.clear()
        peak = allocator_peak(lambda: self.step(program))
        return peak.peak_bytes - peak.base_bytes


def ours(session: Session) -> Program:
    return functools.partial(pipelined_llep, session=session)


def with_new_workspace(policy: DispatchPolicy, group: collectives.Group = None) -> Program:
    """For peaks: the workspace is born inside the measured step."""
    return lambda *args: pipelined_llep(*args, session=Session(policy, group, pool=WorkspacePool()))


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One rank on the anchors' CPU case, two ranks, and the planner."""
    yield planner_row(rounds=20 if quick else 2000)
    yield from one_rank_rows(tokens=2048 if quick else 16_384, rounds=2 if quick else 7)
    for profile in ("balanced", "95/1"):
        yield ranks_row(profile, 2, tokens=1024 if quick else 8192, rounds=2 if quick else 5)


def planner_row(rounds: int) -> dict[str, Any]:
    """Plan and a rank's own tables for E 384, E_p 64 at 95/16."""
    counts = forced_counts("95/16", num_ranks=64, num_tokens=65_536, num_experts=384, num_choices=8)

    def plan() -> None:
        layout = lay_out(counts, plan_experts(counts), chunk_rows=6554 * 8)
        send_tables(layout, 3)
        receive_tables(layout, 3)

    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        plan()
        times.append((time.perf_counter() - started) * 1e3)
    return {
        "label": "plan and own tables, E 384, E_p 64, 95/16", "best_ms": round(min(times), 3),
        "median_ms": round(statistics.median(times), 3),
    }  # fmt: skip


def one_rank_rows(tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """H 512, I 256, E 32, k 4 in 16 chunks: ratios of time and bytes to both baselines."""
    for profile in ("balanced", "95/1"):
        layer = Layer(profile, tokens=tokens, hidden=512, width=256, experts=32, choices=4, natives=32)
        policy = DispatchPolicy(micro_chunks=16)
        session = Session(policy)
        programs: dict[str, Program] = {
            "flat": ours(session), "saved": plain_experts,
            "checkpointed": functools.partial(checkpointed, plain_experts),
        }  # fmt: skip
        timed = interleaved({name: functools.partial(layer.step, run) for name, run in programs.items()}, rounds=rounds)
        session.pool.close()
        programs["flat"] = with_new_workspace(policy)
        peaks = {name: layer.peak_bytes(run) for name, run in programs.items()}
        shape = LayerShape(tokens, 4, 32, 1, 512, 256, 4, 3 * 512 * 256, 4)
        held = cost(shape, policy)
        yield {
            "label": f"one rank, {tokens} tokens, H 512, I 256, E 32, k 4, 16 chunks, {profile}",
            "speed_of_saved": timed["ratio"]["saved"], "speed_of_checkpointed": timed["ratio"]["checkpointed"],
            "spread": timed["spread"], "times_ms": timed["times_ms"],
            "peak_mib": {name: round(size / MiB, 1) for name, size in peaks.items()},
            "predicted_mib": round((held.peak_bytes - held.output // 2) / MiB, 1),
            "peak_of_saved": round(peaks["flat"] / peaks["saved"], 4),
        }  # fmt: skip


def ranks_row(profile: str, ranks: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Over gloo ranks against checkpointed plain expert parallelism and whole-batch LLEP."""
    from tests.support.ranks import run_ranks

    results = run_ranks(on_rank, ranks, profile, tokens, rounds, timeout_s=300.0)
    slowest = max(results, key=lambda result: result["times_ms"]["flat"])
    return {
        "label": f"{ranks} gloo ranks, {tokens} tokens a rank, H 512, I 256, E 32, k 4, {profile}",
        "speed_of_checkpointed": slowest["ratio"]["checkpointed"], "speed_of_saved": slowest["ratio"]["saved"],
        "speed_of_llep": slowest["ratio"]["llep"], "spread": slowest["spread"], "times_ms": slowest["times_ms"],
        "peak_mib": {name: round(max(r["peaks"][name] for r in results) / MiB, 1) for name in slowest["peaks"]},
    }  # fmt: skip


def on_rank(rank: int, world_size: int, profile: str, tokens: int, rounds: int) -> dict[str, Any]:
    group = collectives.world()
    layer = Layer(profile, tokens=tokens, hidden=512, width=256, experts=32, choices=4, natives=32 // world_size)
    plain = functools.partial(plain_expert_parallel, group=group)
    programs: dict[str, Program] = {
        "flat": ours(Session(DispatchPolicy(micro_chunks=8), group)),
        "checkpointed": lambda *args: checkpointed(plain_expert_parallel, *args, group),
        "saved": plain,
        "llep": functools.partial(whole_batch_llep, group=group),
    }

    def step(program: Program) -> None:
        collectives.barrier(group)
        layer.step(program)

    timed = interleaved({name: functools.partial(step, run) for name, run in programs.items()}, rounds=rounds)
    programs["flat"] = with_new_workspace(DispatchPolicy(micro_chunks=8), group)
    return {**timed, "peaks": {name: layer.peak_bytes(run) for name, run in programs.items()}}


def gpu_rows() -> Iterator[dict[str, Any]]:
    """One device, the method's own layer scaled to one rank: 65,536 tokens, H 7168, I 2048, 16 experts, k 8."""
    for profile in ("balanced", "95/1"):
        layer = Layer(
            profile, tokens=65_536, hidden=7168, width=2048, experts=16, choices=8, natives=16,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        policy = DispatchPolicy(chunk_tokens=6554)
        row: dict[str, Any] = {"label": f"one GPU, 65,536 tokens, H 7168, I 2048, 16 experts, k 8, {profile}"}
        pool = WorkspacePool()
        programs: dict[str, Program] = {"flat": ours(Session(policy, pool=pool))}
        # What is saved is 8 x 65,536 rows at 7 widths: it fits 140 GB only barely, so each is measured by itself.
        plain = {"saved": plain_experts, "checkpointed": functools.partial(checkpointed, plain_experts)}
        for name, program in {**programs, **plain}.items():
            try:
                measured = with_new_workspace(policy) if name == "flat" else program
                row[f"{name}_gib"] = round(layer.peak_bytes(measured) / 2**30, 2)
                row[f"{name}_ms"] = _median_ms(functools.partial(layer.step, program))
            except torch.OutOfMemoryError:
                row[f"{name}_gib"] = row[f"{name}_ms"] = "out of memory"
            layer.clear()
            torch.accelerator.empty_cache()
        pool.close()
        yield row


def _median_ms(step: Callable[[], None], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return round(statistics.median(times), 1)
