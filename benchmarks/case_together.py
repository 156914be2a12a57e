"""All four together on two CPU ranks: the longest context under one ceiling, and what each flattener costs.

One fixed shape (H 256, I 128, E 32, k 4, L 8, V 32,768, 8 heads, float32), one sequence a rank. The plain program is
FSDP2, ordinary expert parallelism and per-block checkpointing. Peaks are of the allocator's own calls (heap.py) over
building the run and training it, host arenas left out. Times are ratios of steps that alternate in one run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.heap import heap_peak, preloaded
from benchmarks.timing import interleaved
from steppe.core.units import MiB
from steppe.flatteners import NAMES
from steppe.integrations.transformers import token_losses
from steppe.runtime import collectives
from steppe.training.config import RunConfig, parse
from steppe.training.data import Batch
from steppe.training.loop import Trainer

CASE = "together"
TESTS = "tests/test_all_subsets.py"
RANKS, VOCAB, HIDDEN = 2, 32_768, 256
CEILING = 1.05  # of the plain program's peak at BASE tokens a rank
BASE = 1024
GRID = 64  # contexts are multiples of it
SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 128,
    "moe_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False,
    "max_position_embeddings": 2**20,
}  # fmt: skip
POLICIES = {
    "dispatch": {"chunk_tokens": 512}, "vocab": {"budget_bytes": 8 * MiB}, "boundary": "on",
    "optimizer": {"bucket_bytes": 4 * MiB},
}  # fmt: skip
CHUNK = 128  # tokens whose logits the chunked plain program holds at a time


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Contexts under the ceiling, then times with every flattener alone, missing, and all."""
    yield context_row(quick)
    yield ablation_row(256 if quick else BASE, rounds=3 if quick else 9)


def run_config(tokens: int, names: tuple[str, ...], folder: Path) -> RunConfig:
    """The fixed shape on two ranks with some of the flatteners."""
    return parse({
        "model": {"shape": SHAPE}, "data": {"seq_len": tokens, "packing": "stream", "tokenizer_vocab": 1024},
        "train": {"steps": 1000, "lr": 1e-4}, "output": {"dir": str(folder)},
        "launch": {"ranks": RANKS, "expert": RANKS, "vocab": RANKS},
        "flatten": {name: POLICIES[name] for name in names},
    })  # fmt: skip


def random_batch(tokens: int, rank: int) -> Batch:
    """One sequence of random tokens."""
    ids = torch.randint(VOCAB, (1, tokens + 1), generator=torch.Generator().manual_seed(rank))
    return Batch(ids[:, :-1], torch.arange(tokens)[None], ids[:, 1:])


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Plain cross-entropy CHUNK tokens at a time, each chunk's logits made again in the backward."""
    pairs = zip(hidden.flatten(0, -2).split(CHUNK), labels.reshape(-1).split(CHUNK), strict=True)
    return torch.cat([checkpoint(token_losses, h, weight, bias, y, use_reentrant=False) for h, y in pairs])


def build(program: str, tokens: int, folder: Path) -> Trainer:
    """`plain`, `chunked`, `all`, or the names of flatteners joined by `+`."""
    names = NAMES if program == "all" else tuple(n for n in NAMES if n in program.split("+"))
    trainer = Trainer(run_config(tokens, names, folder), cache=folder)
    if program == "chunked":
        trainer.model.loss_function._run = chunked_losses
    return trainer


# --- context under a ceiling -----------------------------------------------------------------------------------------


def peak_on_rank(rank: int, world_size: int, program: str, tokens: int, steps: int, folder: str) -> int:
    """The allocator's peak in bytes over building the run and training it."""

    def run() -> None:
        trainer = build(program, tokens, Path(folder))
        for _ in range(steps):
            trainer.step([random_batch(tokens, rank)])
        trainer.flattened.detach()

    return heap_peak(run)


def measured(program: str, tokens: int, steps: int = 2) -> int:
    """The higher peak of the two ranks."""
    from tests.support.ranks import run_ranks

    with preloaded(), tempfile.TemporaryDirectory() as folder:
        peak: int = max(run_ranks(peak_on_rank, RANKS, program, tokens, steps, folder, timeout_s=3000.0))
    print(f"  {program}, {tokens} tokens a rank: {peak / MiB:.1f} MiB", flush=True)
    return peak


def longest(program: str, ceiling: int, start: int) -> tuple[int, dict[int, int]]:
    """The most tokens a rank, in steps of GRID, whose measured peak is within the ceiling; and all peaks measured.

    Found by straight lines through the two nearest contexts; done when the next step is measured to be above.
    """
    peaks = {start: measured(program, start), 2 * start: measured(program, 2 * start)}
    while True:
        fits = max((n for n, peak in peaks.items() if peak <= ceiling), default=0)
        above = min((n for n, peak in peaks.items() if peak > ceiling), default=None)
        if above == fits + GRID:
            return fits, peaks
        guess = _guess(peaks, ceiling) // GRID * GRID
        guess = max(guess, fits + GRID)
        guess = min(guess, 2 * max(peaks) if above is None else above - GRID)
        peaks[guess] = measured(program, guess)


def _guess(peaks: dict[int, int], ceiling: int) -> int:
    """Where a line through the two contexts whose peaks are nearest to the ceiling meets it."""
    (low, at_low), (high, at_high) = sorted(sorted(peaks.items(), key=lambda item: abs(item[1] - ceiling))[:2])
    return low + int((ceiling - at_low) * (high - low) / max(1, at_high - at_low))


def context_row(quick: bool) -> dict[str, Any]:
    """Naive plain and chunked plain to their limit; steppe at the contexts that have to fit and near its own limit.

    Beyond some context the peak is a straight line: what is left of it without its slope (the O(N*H) terms) is flat.
    """
    base = 256 if quick else BASE
    ceiling = int(CEILING * measured("plain", base))
    naive, naive_peaks = longest("plain", ceiling, base // 2)
    chunked, chunked_peaks = longest("chunked", ceiling, base)
    goal = -(-max(16 * naive, 3 * chunked) // GRID) * GRID
    flat = {n: measured("all", n, steps=2 if n < goal else 1) for n in (goal // 8, goal // 4, goal // 2, goal)}
    slope = (flat[goal] - flat[goal // 2]) / (goal - goal // 2)
    most = int(goal + (0.995 * ceiling - flat[goal]) / slope) // GRID * GRID  # half a percent below the line's end
    if not quick and most > goal:
        flat[most] = measured("all", most, steps=1)
    fits = max((n for n, peak in flat.items() if peak <= ceiling), default=0)
    rest = {n: (peak - slope * n) / MiB for n, peak in flat.items()}
    return {
        "label": f"context under {CEILING} x the plain peak at {base} tokens a rank, {RANKS} gloo ranks",
        "ceiling_mib": round(ceiling / MiB, 1), "longest_naive": naive, "longest_chunked": chunked, "steppe_fits": fits,
        "times_naive": round(fits / naive, 2), "times_chunked": round(fits / chunked, 2),
        "peak_mib": {
            "naive": _mib(naive_peaks), "chunked": _mib(chunked_peaks), "steppe": _mib(flat),
        },
        "steppe_bytes_a_token": round(slope), "steppe_tensors_of_H": round(slope / (4 * HIDDEN), 2),
        "steppe_peak_without_those_mib": {n: round(value, 1) for n, value in rest.items()},
    }  # fmt: skip


def _mib(peaks: dict[int, int]) -> dict[int, float]:
    return {tokens: round(peak / MiB, 1) for tokens, peak in sorted(peaks.items())}


# --- ablation --------------------------------------------------------------------------------------------------------


def programs() -> list[str]:
    """Plain, each alone, all but one, all."""
    missing = ["+".join(n for n in NAMES if n != gone) for gone in NAMES]
    return ["plain", *NAMES, *missing, "all"]


def times_on_rank(rank: int, world_size: int, tokens: int, rounds: int, folder: str) -> dict[str, Any]:
    trainers = {program: build(program, tokens, Path(folder)) for program in programs()}
    group = collectives.world()

    def stepper(trainer: Trainer) -> Callable[[], None]:
        def step() -> None:
            collectives.barrier(group)
            trainer.step([random_batch(tokens, rank)])

        return step

    return interleaved({name: stepper(trainer) for name, trainer in trainers.items()}, rounds=rounds)


def ablation_row(tokens: int, rounds: int) -> dict[str, Any]:
    """Step times over plain's, at the largest context that plain trains under the ceiling (in whole BASEs)."""
    from tests.support.ranks import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(times_on_rank, RANKS, tokens, rounds, folder, timeout_s=3000.0)
    slowest = max(results, key=lambda result: result["times_ms"]["all"])
    everything = {"+".join(n for n in NAMES if n != gone): f"all but {gone}" for gone in NAMES}

    def named(values: dict[str, Any]) -> dict[str, Any]:
        return {everything.get(name, name): value for name, value in values.items()}

    return {
        "label": f"step time over plain's, {tokens} tokens a rank, {RANKS} gloo ranks",
        "ratio": named(slowest["ratio"]), "spread": named(slowest["spread"]), "times_ms": named(slowest["times_ms"]),
        "rounds": slowest["rounds"], "target": {"all": 1.1},
    }  # fmt: skip
