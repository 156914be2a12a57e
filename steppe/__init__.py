"""Flat memory for long-context MoE training: four exact schedules and a planner.

Names are loaded when they are first used, so that `import steppe` and `steppe plan` never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_HOME = {
    "OFF": "steppe.core.policy",
    "flatten_peaks": "steppe.compose",
    "DispatchPolicy": "steppe.flatteners.dispatch.budget",
    "ExpertWeights": "steppe.flatteners.dispatch.weights",
    "PipelinedLLEP": "steppe.flatteners.dispatch.exchange",
    "pipelined_llep": "steppe.flatteners.dispatch.exchange",
    "Ledger": "steppe.core.ledger",
    "MeshShape": "steppe.core.shapes",
    "profile": "steppe.profiler",
    "OffloadStreamAdamW": "steppe.flatteners.optimizer.adamw",
    "OptimizerPolicy": "steppe.flatteners.optimizer.budget",
    "clip_grad_norm_": "steppe.flatteners.optimizer.norms",
    "BoundaryPolicy": "steppe.flatteners.boundary.budget",
    "SCO": "steppe.flatteners.boundary.attach",
    "long_lived": "steppe.flatteners.boundary.checkpoint",
    "RingDTPLoss": "steppe.flatteners.vocab.attach",
    "RingDTPOutput": "steppe.flatteners.vocab.ring",
    "VocabPolicy": "steppe.flatteners.vocab.budget",
    "ring_dtp": "steppe.flatteners.vocab.ring",
    "ring_dtp_loss": "steppe.flatteners.vocab.ring",
    "ring_logsumexp": "steppe.flatteners.vocab.reductions",
    "ring_softmax_matmul": "steppe.flatteners.vocab.reductions",
    "ring_topk": "steppe.flatteners.vocab.reductions",
    "vocab_parallel_embedding": "steppe.flatteners.vocab.embedding",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'steppe' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
