"""Ties of the router: broken the other way in the recompute they change no gradient under SCO's checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import steppe
from steppe.flatteners.dispatch.attach import attach, diagnose
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.integrations.transformers import checkpoint_blocks
from tests.support.exactness import assert_bitwise
from tests.support.float64 import float64_model, toy_config

IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))


class Ties:
    """torch.topk that breaks ties upwards, or downwards in every second call while `turning`."""

    def __init__(self, turning: bool) -> None:
        self.turning, self.calls, self.topk = turning, 0, torch.topk

    def __call__(self, scores: torch.Tensor, k: int, dim: int = -1, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        # Calls of the forward come first, one a layer; those of the recompute break ties the other way.
        sign = -1 if self.turning and self.calls > 2 else 1
        nudge = sign * 1e-9 * torch.arange(scores.shape[-1], dtype=scores.dtype)
        ids = self.topk(scores.detach() + nudge, k, dim=dim).indices
        return scores.gather(dim, ids), ids


def upcycled() -> Any:
    """A sparsely upcycled model: experts and their router rows are pairs of twins, so that every score is a tie and an
    odd number of choices cuts through one."""
    model = float64_model(toy_config("qwen3_moe", num_experts_per_tok=3)).train()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                if weight is layer.mlp.gate.weight:
                    weight.normal_(generator=torch.Generator().manual_seed(2))
                weight[1::2] = weight[0::2]
    return model


def gradients(monkeypatch: pytest.MonkeyPatch, turning: bool, how: str) -> tuple[dict[str, torch.Tensor], Any]:
    model = upcycled()
    attached = attach(model, DispatchPolicy(chunk_tokens=5))
    sco = None
    if how == "sco":
        sco = steppe.SCO(steppe.BoundaryPolicy()).apply(model)
        attached.ties_pinned = True
    else:
        checkpoint_blocks(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", Ties(turning))
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    stats = attached.stats()
    if sco is not None:
        sco.close()
    return found, stats


def test_a_tie_broken_the_other_way_changes_no_gradient_under_sco(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, _ = gradients(monkeypatch, False, "sco")
    turned, stats = gradients(monkeypatch, True, "sco")
    for name, value in steady.items():
        assert_bitwise(turned[name], value, name)
    assert [layer.flipped for layer in stats["layers"]] == [0, 0]
    assert [layer.forwards for layer in stats["layers"]] == [1, 1]
    assert not any("ties" in line or "recomputes" in line for line in diagnose(stats))


def test_under_another_checkpoint_the_report_says_that_ties_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, stats = gradients(monkeypatch, False, "torch")
    assert any("can't be pinned" in line for line in diagnose(stats))
    turned, stats = gradients(monkeypatch, True, "torch")
    assert [layer.flipped for layer in stats["layers"]] == [1, 1]
    assert any("chose other experts" in line for line in diagnose(stats))
    router = "model.layers.0.mlp.gate.weight"
    assert (turned[router] - steady[router]).norm() > 1e-3 * steady[router].norm()  # the fault is real
