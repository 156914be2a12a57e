"""Case `vocab`: the vocabulary projection and its loss, forward and backward, next to plain and to torch's own.

Every row holds interleaved time ratios, the transient measured by the allocator's events and the transient predicted.
The plain program is F.cross_entropy(F.linear(...)); torch's is F.linear_cross_entropy with its default chunking.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import interleaved
from steppe.core.units import MiB
from steppe.flatteners.vocab.budget import VocabPolicy, transient
from steppe.flatteners.vocab.prepare import device_defaults
from steppe.flatteners.vocab.products import operand_dtype
from steppe.flatteners.vocab.reference import plain_loss
from steppe.flatteners.vocab.ring import ring_dtp_loss
from steppe.flatteners.vocab.schedule import Head, choose
from steppe.runtime.allocator import allocator_peak

CASE = "vocab"
TESTS = "tests/flatteners/vocab"
Step = Callable[[], object]
OF = ["loss", "hidden gradient", "weight gradient"]


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    yield from _against_plain_and_torch([("float32", 2048, 512, 32_768)], rounds=2 if quick else 7)
    yield from _errors_by_tiles(quick)
    yield from _two_ranks(quick)
    if not quick:
        wide = [("float32", 1024, 512, 151_936), ("bfloat16", 2048, 512, 32_768)]
        yield from _against_plain_and_torch(wide, rounds=3)


class Problem:
    """Inputs of one shape, and the candidates."""

    def __init__(self, rows: int, width: int, vocab: int, dtype: torch.dtype, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.shape, self.device = (rows, width, vocab), torch.device(device)
        self.hidden = torch.randn(rows, width, dtype=dtype, device=device, requires_grad=True)
        self.weight = (torch.randn(vocab, width, device=device) * 0.02).to(dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (rows,), device=device)

    def step(self, loss: Callable[[], torch.Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(), (self.hidden, self.weight))

    def plain(self) -> Step:
        return self.step(lambda: F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.labels))

    def ours(self, policy: VocabPolicy) -> Step:
        return self.step(lambda: ring_dtp_loss(self.hidden, self.weight, self.labels, policy=policy))

    def torchs(self) -> Step:
        def loss() -> torch.Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options = torch.nn.LinearCrossEntropyOptions()
                return F.linear_cross_entropy(self.hidden, self.weight, self.labels, options=options)

        return self.step(loss)

    def predicted(self, policy: VocabPolicy) -> tuple[str, int]:
        """Schedule and transient by the budget."""
        budget_bytes, scratch_bytes, rates = device_defaults(self.device.type)
        item = self.hidden.element_size()
        operand = operand_dtype(self.hidden).itemsize
        head = Head((self.shape[0],), (self.shape[2],), self.shape[1], item, item, operand_bytes=operand)
        schedule, sizes = choose(policy.schedule, head, policy.limits(budget_bytes, scratch_bytes), rates)
        return schedule, transient(schedule, head, sizes).peak_bytes

    def measured(self, step: Step) -> int:
        """Bytes above inputs and the two gradients."""
        step()
        peak = allocator_peak(step, device=self.device)
        gradients = sum(t.numel() * t.element_size() for t in (self.hidden, self.weight))
        return peak.peak_bytes - peak.base_bytes - gradients


def _against_plain_and_torch(cases: list[tuple[str, int, int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    for dtype, num_rows, width, vocab in cases:
        problem = Problem(num_rows, width, vocab, getattr(torch, dtype))
        policies = {"ours": VocabPolicy(), "ours weights": VocabPolicy("weights"), "ours local": VocabPolicy("local")}
        steps = {"plain": problem.plain(), **{name: problem.ours(p) for name, p in policies.items()}}
        if hasattr(F, "linear_cross_entropy"):
            steps["torch linear_cross_entropy"] = problem.torchs()
        timed = interleaved(steps, rounds=rounds)
        held = {name: problem.measured(step) for name, step in steps.items()}
        predicted = {name: problem.predicted(policy) for name, policy in policies.items()}
        yield {
            "label": f"{dtype} N {num_rows} H {width} V {vocab}", **timed, "transient_bytes": held,
            "transient_of_plain": {name: round(size / held["plain"], 4) for name, size in held.items()},
            "predicted_bytes": {name: size for name, (_, size) in predicted.items()},
            "schedule": {name: schedule for name, (schedule, _) in predicted.items()},
            "threads": torch.get_num_threads(),
        }  # fmt: skip


def _errors_by_tiles(quick: bool) -> Iterator[dict[str, Any]]:
    """Relative error of loss and gradients against float64, by the number of strips a row meets."""
    problem = Problem(64, 32, 4096, torch.float32)
    wide = [t.detach().double().requires_grad_() for t in (problem.hidden, problem.weight)]

    def values(hidden: torch.Tensor, weight: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    truth = values(*wide, plain_loss(*wide, problem.labels)["loss"])
    inputs = problem.hidden, problem.weight
    found = {"plain": values(*inputs, plain_loss(*inputs, problem.labels)["loss"])}
    for num_tiles in (1, 8, 64, 512) if quick else (1, 4, 16, 64, 256, 1024, 4096):
        policy = VocabPolicy("weights", tile_tokens=64, tile_vocab=4096 // num_tiles)
        found[f"{num_tiles} tiles"] = values(*inputs, ring_dtp_loss(*inputs, problem.labels, policy=policy))
    errors = {
        name: [float(f"{((v.double() - t).norm() / t.norm()).item():.2e}") for v, t in zip(those, truth, strict=True)]
        for name, those in found.items()
    }
    yield {"label": "error by tiles", "errors": errors, "of": OF}
    from tests.support.ranks import run_ranks

    by_ranks: dict[str, Any] = {}
    for ranks in (2,) if quick else (1, 2, 3, 4):
        told = run_ranks(errors_on_ranks, ranks)
        by_ranks[f"{ranks} ranks"] = {name: [max(rank[name][i] for rank in told) for i in range(3)] for name in told[0]}
    yield {"label": "error by ranks", "errors": by_ranks, "of": OF}


def errors_on_ranks(rank: int, world_size: int) -> dict[str, list[float]]:
    """Relative errors of one rank's share; of the largest rank, they are published."""
    from steppe.runtime import collectives
    from tests.flatteners.vocab.programs import Spec, make, ours, plain, spans
    from tests.support.exactness import relative_error

    base, rest = divmod(4096, world_size)
    shards = tuple(base + (r < rest) for r in range(world_size))
    spec = Spec(rows=(64,) * world_size, shards=shards, width=32, sizes={"tile_tokens": 16, "tile_vocab": 128})
    tensors, group = make(spec), collectives.world() if world_size > 1 else None
    rows, shard = spans(spec.rows)[rank], spans(spec.shards)[rank]
    truth, true_grads = plain(spec, tensors.to(torch.float64))
    found = {}
    for schedule in ("plain", "one_pass", "weights", "activations"):
        if schedule == "plain":
            values, grads = plain(spec, tensors)
            loss, grads = values["loss"], [grads[0][rows], grads[1][shard]]
        else:
            values, grads = ours(spec.but(schedule=schedule), tensors, rank, group)
            loss = collectives.all_reduce(values["loss"].detach().clone(), group)
        pairs = zip((loss, *grads[:2]), (truth["loss"], true_grads[0][rows], true_grads[1][shard]), strict=True)
        found[schedule] = [float(f"{relative_error(mine, true):.2e}") for mine, true in pairs]
    return found


def _two_ranks(quick: bool) -> Iterator[dict[str, Any]]:
    """Two gloo ranks next to the plain vocabulary-parallel program; reported, not gated."""
    from tests.support.ranks import run_ranks

    yield run_ranks(time_two_ranks, 2, 2 if quick else 5, timeout_s=300.0)[0]


def time_two_ranks(rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    from steppe.runtime import collectives

    group, shape = collectives.world(), (1024, 512, 32_768)
    problem = Problem(shape[0], shape[1], shape[2] // world_size, torch.float32)
    labels = torch.randint(0, shape[2], (shape[0],))
    inputs = problem.hidden, problem.weight

    def ours(schedule: str) -> Step:
        policy = VocabPolicy(schedule)
        return problem.step(lambda: ring_dtp_loss(*inputs, labels, group=group, policy=policy))

    steps: dict[str, Step] = {"plain vocabulary parallel": lambda: vocab_parallel_plain(*inputs, labels, group)}
    steps |= {name: ours(name) for name in ("one_pass", "weights", "activations")}
    timed = interleaved(steps, rounds=rounds)
    held = {name: problem.measured(step) for name, step in steps.items()}
    return {"label": f"2 gloo ranks, N {shape[0]} a rank, V {shape[2]}", **timed, "transient_bytes": held}


def vocab_parallel_plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gathered activations, whole logits of a shard, all-reduced statistics: loss gradients of the sum."""
    from steppe.runtime import collectives

    with torch.no_grad():
        rows, everyone = collectives.all_gather(hidden, group).flatten(0, 1), collectives.all_gather(labels, group)
        own = everyone.flatten() - collectives.rank(group) * weight.shape[0]
        logits = rows @ weight.T
        logits -= collectives.all_reduce(logits.amax(1), group, "max")[:, None]
        hit = (own >= 0) & (own < weight.shape[0])
        grad = logits.exp()
        grad /= collectives.all_reduce(grad.sum(1), group)[:, None]
        grad[hit, own[hit]] -= 1
        grad /= rows.shape[0]
        into = torch.empty_like(hidden)
        collectives.reduce_scatter_into(into.view(-1), (grad @ weight).view(-1), group)
        return into, grad.T @ rows


def gpu_rows() -> Iterator[dict[str, Any]]:
    """N 8192, H 4096, V 128256 in bf16; Liger where it is installed."""
    num_rows, width, vocab = 8192, 4096, 128_256
    problem = Problem(num_rows, width, vocab, torch.bfloat16, "cuda")
    steps = {"plain": problem.plain(), "ours": problem.ours(VocabPolicy())}
    if hasattr(F, "linear_cross_entropy"):
        steps["torch linear_cross_entropy"] = problem.torchs()
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        steps["liger"] = problem.step(lambda: liger(problem.weight, problem.hidden, problem.labels))
    except ImportError:
        pass
    timed = interleaved(steps, rounds=10)
    flops = 3 * 2 * num_rows * width * vocab
    yield {
        "label": f"gpu bfloat16 N {num_rows} H {width} V {vocab}", **timed,
        "tflops": {name: round(flops / taken / 1e9, 1) for name, taken in timed["times_ms"].items()},
        "transient_mib": {name: round(problem.measured(step) / MiB, 1) for name, step in steps.items()},
    }  # fmt: skip
