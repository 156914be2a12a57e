"""LoRA under all four: frozen experts are stored once, and have no state, no gradient and no gradient's work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steppe.compose import flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations.float64 import float64_truth
from steppe.runtime import collectives
from tests.composition.programs import LABELS, LENGTH, ROWS, Seen, own, policies, settle, tokens, whole
from tests.support.exactness import assert_reordered
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

RANK, LAYERS, HIDDEN, WIDTH = 2, 2, 32, 16
EXPERT_PASS = 2 * ROWS * LENGTH * 2 * LAYERS * 3 * HIDDEN * WIDTH


class LowRank(nn.Module):
    """A frozen projection plus a learned one of rank RANK."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features, generator=draw).to(base.weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, RANK, generator=draw).to(base.weight.dtype) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def adapt(model: Any) -> Any:
    """Everything frozen, adapters on the attention's projections, equal in every copy of the model."""
    model.requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        for place, name in enumerate(("q_proj", "v_proj")):
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, LowRank(base, 10 * number + place))
    return model


def _toy() -> Any:
    return settle(toy_model("qwen3_moe").train())  # hot experts, so that some of them travel


def _step(model: Any, ids: torch.Tensor) -> Seen:
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss
    loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().reshape(1).clone(), **found}


def _on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    model = adapt(_toy())
    mesh = MeshShape(world_size, expert=world_size, vocab=world_size)
    made = flatten_peaks(model, policies(NAMES), mesh=mesh)
    optimizer = made.optimizer(0.01)
    seen = _step(model, tokens(0)[own(mesh, rank)])
    collectives.all_reduce(seen["loss"], collectives.world())
    optimizer.step()
    parameters = dict(model.named_parameters())
    experts = {name: p for name, p in parameters.items() if ".experts." in name}
    here = {name: getattr(p, "_local_tensor", p).numel() for name, p in parameters.items()}
    found = {
        "seen": seen,
        "frozen gradients": [name for name, p in parameters.items() if p.grad is not None and not p.requires_grad],
        "whole experts": sum(p.numel() for p in experts.values()),
        "own experts": sum(here[name] for name in experts),
        "own adapters": sum(here[name] for name, p in parameters.items() if p.requires_grad),
        "states": len(optimizer.state),
        "optimizer": made.stats()["optimizer"],
        "counters": made.stats()["dispatch"]["counters"],
    }
    made.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_experts_cost_their_weights_once_and_nothing_else(world_size: int) -> None:
    found = run_ranks(_on_ranks, world_size)
    plain, truth = (_step(adapt(model), tokens(0)) for model in (_toy(), float64_truth(_toy())))
    assert found[0]["seen"].keys() == plain.keys() == truth.keys(), "the adapters' gradients, and no others"
    assert len(plain) == 1 + 4 * LAYERS
    for name, value in found[0]["seen"].items():
        assert_reordered(value, plain[name], truth[name], length=ROWS * LENGTH * world_size, what=name)
    assert not any(one["frozen gradients"] for one in found)
    assert sum(one["own experts"] for one in found) == found[0]["whole experts"], "each expert on one rank"
    for one in found:
        assert one["states"] == 4 * LAYERS
        assert one["optimizer"]["num_elements"] == one["own adapters"]
    counters = [one["counters"] for one in found]
    # one pass forward, the first product again, token gradients; no pass for gradients of weights
    assert sum(each["flops"] for each in counters) == round(EXPERT_PASS * (1 + 2 / 3 + 1))
    assert (sum(each.get("weights_sent", 0) for each in counters) > 0) == (world_size > 1), "hot experts travel"
    assert not any(each.get("gradients_sent", 0) or each.get("most_sums_held", 0) for each in counters)


def _one_learns(rank: int, world_size: int) -> int:
    """Only rank 0's experts have gradients: an odd thing to do, and no reason to hang."""
    model = _toy()
    if rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
    from steppe.compose import attach_all
    from steppe.runtime.mesh import make_meshes

    mesh = MeshShape(world_size, expert=world_size)
    made = attach_all(model, policies(("dispatch",)), make_meshes(mesh, torch.device("cpu")))
    ids = tokens(0)[own(mesh, rank)]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    made.close()
    return sum(p.grad is not None for name, p in model.named_parameters() if ".experts." in name)


def test_experts_frozen_on_one_rank_only_do_not_hang() -> None:
    assert run_ranks(_one_learns, 2, timeout_s=20) == [2 * LAYERS, 0]
