"""SCO against plain checkpointing: time of a forward and backward, and the peaks, predicted and measured.

The baseline is torch's own non-reentrant checkpoint. The shape is the demo's: 4,096 tokens, H 256, 8 blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.timing import interleaved
from steppe import OFF, SCO, BoundaryPolicy
from steppe.core.ledger import Ledger
from steppe.core.shapes import BatchShape, Dtypes, ModelShape, RunShape
from steppe.flatteners.boundary import budget
from steppe.flatteners.boundary.reference import checkpointed
from steppe.runtime.allocator import allocator_peak

CASE = "boundary"
TESTS = "tests/flatteners/boundary"
HEADS, EXPERTS, CHOSEN, WIDTH, VOCAB = 4, 8, 2, 128, 1024


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """One row a shape: ratio of step times with its spread, peaks of both, predicted and measured."""
    tokens, hidden, layers = (512, 64, 4) if quick else (4096, 256, 8)
    yield _row("demo shape", tokens, hidden, layers, BoundaryPolicy(), rounds=3 if quick else 9)
    if not quick:
        attention = "aten._scaled_dot_product_flash_attention_for_cpu"
        policy = BoundaryPolicy(offload_extra=(attention,))
        yield _row("demo shape, attention kept", tokens, hidden, layers, policy, rounds=9)


def _row(label: str, tokens: int, hidden: int, layers: int, policy: BoundaryPolicy, rounds: int) -> dict[str, Any]:
    model = _model(hidden, layers)
    ids = torch.randint(0, VOCAB, (1, tokens))
    sco = SCO(policy)
    shape = RunShape(
        ModelShape("qwen3_moe", hidden, layers, VOCAB, HEADS, HEADS, hidden // HEADS, WIDTH, EXPERTS, CHOSEN, WIDTH),
        BatchShape(tokens), dtypes=Dtypes("float32", "float32", "float32", "float32"),
    )  # fmt: skip
    sco.reserve(budget.host_blocks(shape, policy))
    steps = {"plain": _step(model, ids, checkpointed), "sco": _step(model, ids, sco.checkpoint)}
    timed = interleaved(steps, rounds=rounds, warm_up=2)
    peaks = {name: allocator_peak(step).peak_bytes for name, step in steps.items()}
    on, off = (Ledger.from_entries(budget.entries(shape, p)) for p in (policy, OFF))
    stats = sco.stats()
    row = {
        "label": label, "tokens": tokens, "hidden": hidden, "layers": layers,
        "ratio": timed["ratio"]["sco"], "spread": timed["spread"]["sco"], "times_ms": timed["times_ms"],
        "predicted_peak_bytes": {"plain": off.peaks["boundary"], "sco": on.peaks["boundary"]},
        "predicted_saving_bytes": off.peaks["boundary"] - on.peaks["boundary"],
        "measured_saving_bytes": peaks["plain"] - peaks["sco"],
        "host_bytes": stats.bytes_reserved, "predicted_host_bytes": on.host_bytes,
        "late_reloads": f"{stats.waits} of {stats.reloads}",
    }  # fmt: skip
    sco.close()
    return row


def _model(hidden: int, layers: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=hidden // HEADS, intermediate_size=WIDTH, moe_intermediate_size=WIDTH,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, max_position_embeddings=8192, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _step(model: Any, ids: torch.Tensor, checkpoint: Callable[..., Any]) -> Callable[[], None]:
    def step() -> None:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
        model.model(input_ids=ids, use_cache=False).last_hidden_state.float().square().mean().backward()

    return step
