"""The float64 program of a run's first step, and how far a side is from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from steppe.integrations import transformers as hf
from steppe.integrations.float64 import float64_model
from steppe.runtime import collectives
from steppe.sides import Side
from steppe.training.config import RunConfig
from steppe.training.data import Batch
from steppe.training.loop import Trainer
from steppe.training.model import build_model, load_model_config

LARGEST_BYTES = 2 * 2**30  # of the float64 program's scores and logits; a larger one is not attempted


@dataclass(frozen=True)
class Truth:
    """Loss and gradients of the first step in float64, over all ranks' micro-batches."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def estimated_bytes(config: RunConfig, model_config: Any) -> int:
    """What the float64 program holds at least: three float64 logits and two layers' whole attention scores."""
    rows, length = config.train.batch, config.data.seq_len
    scores = 4 * rows * model_config.num_attention_heads * length**2
    return 8 * (3 * rows * length * model_config.vocab_size + scores)


def first_step(config: RunConfig) -> Truth | None:
    """Every rank computes the whole step, so that each can judge its own; None where it would be too large.

    Peak: `estimated_bytes` plus 16 bytes a parameter.
    """
    model_config = load_model_config(config)
    if estimated_bytes(config, model_config) > LARGEST_BYTES:
        return None
    weights = dict(build_model(config, model_config).state_dict())
    model = float64_model(model_config, weights).train()
    loss_function = hf.PlainLoss(model)
    trainer = Trainer(config.plain())
    batches = _whole_rows(collectives.all_gather_object(list(trainer.data.batches(0)), trainer.group), config)
    del trainer
    tokens, valid = sum(b.num_tokens for b in batches), sum(b.num_valid for b in batches)
    loss = 0.0
    for batch in batches:
        share = batch.num_tokens / tokens
        part = hf.loss_of(model, batch.input_ids, batch.position_ids, batch.labels, num_valid=valid, share=share)
        part.total.backward()
        loss += part.cross_entropy.item()
    loss_function.detach()
    return Truth(loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def _whole_rows(by_rank: Sequence[Sequence[Batch]], config: RunConfig) -> list[Batch]:
    """All ranks' micro-batches, those of the D ranks that share a sequence joined again."""
    slices = config.launch.sequence
    groups = [by_rank[start : start + slices] for start in range(0, len(by_rank), slices)]
    return [_joined(parts) for group in groups for parts in zip(*group, strict=True)]


def _joined(parts: Sequence[Batch]) -> Batch:
    return Batch(*(torch.cat([getattr(part, f.name) for part in parts], dim=1) for f in fields(Batch)))


def distance(side: Side, truth: Truth) -> dict[str, float]:
    """A side's own error: of the first loss, and the largest and median over parameters of the gradient's."""
    errors = sorted(_errors(side, truth), key=not_a_number_last)
    return {
        "loss_abs_err": abs(side.results[0].loss - truth.loss),
        "max_grad_rel_err": errors[-1] if errors else 0.0,
        "median_grad_rel_err": errors[len(errors) // 2] if errors else 0.0,
    }


def not_a_number_last(error: float) -> tuple[bool, float]:
    """The order of errors, in which NaN is the largest: compared as it is, it would vanish beside any number."""
    return math.isnan(error), error


def _errors(side: Side, truth: Truth) -> list[float]:
    errors = []
    for name, gradient in side.gradients.items():
        whole = getattr(gradient, "full_tensor", gradient.clone)()
        true = truth.gradients[name]
        difference, scale = (whole.double().cpu() - true).norm().item(), true.norm().item()
        errors.append(difference / scale if scale else difference)
    return errors
