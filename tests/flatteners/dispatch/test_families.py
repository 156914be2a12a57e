"""The six model families with steppe attached, against the plain model in float64 on one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from steppe.flatteners.dispatch.attach import attach
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.integrations.transformers import checkpoint_blocks
from tests.flatteners.dispatch import on_ranks
from tests.support.exactness import assert_reordered
from tests.support.float64 import FAMILIES, float64_model, toy_config, toy_model
from tests.support.ranks import run_ranks

POLICY = DispatchPolicy(chunk_tokens=5)


def truth(family: str, ranks: int) -> dict[str, torch.Tensor]:
    """Gradients of the plain float64 model over all ranks' batches."""
    model = float64_model(toy_config(family)).train()
    on_ranks.spread_routers(model)
    return _step(model, ranks)


def _step(model: Any, ranks: int) -> dict[str, torch.Tensor]:
    batches = [on_ranks.batch_of(r) for r in range(ranks)]
    divisor = sum(batch.numel() - 1 for batch in batches)
    for batch in batches:
        on_ranks.summed_loss(model, batch, divisor).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(
    ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], what: str
) -> None:
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        # A model chains sums of H, of V and of all routes: the band's length is a product of them.
        assert_reordered(ours[name], plain[name], expected, length=256 * 32, what=f"{what}, {name}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_one_rank_equals_the_plain_model_and_runs_experts_forward_once(family: str, again: bool) -> None:
    model = float64_model(toy_config(family)).train()
    on_ranks.spread_routers(model)
    attached = attach(model, POLICY)
    if again:
        checkpoint_blocks(model)
    exact = truth(family, 2)
    assert_equal(_step(model, 2), exact, exact, family)
    layers = attached.stats()["layers"]
    assert layers
    assert all((layer.forwards, layer.backwards, layer.flipped) == (2, 2, 0) for layer in layers)
    assert all(layer.recomputes == (2 if again else 0) for layer in layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_dtypes_are_no_further_from_float64_than_the_plain_model(family: str, dtype: torch.dtype) -> None:
    """The experts' own gradients; a model's other sums are not ours to judge."""
    weights = {name: value.to(dtype) for name, value in toy_model(family).state_dict().items()}
    exact_model = float64_model(toy_config(family), weights).train()
    plain_model, ours_model = (toy_model(family).to(dtype).train() for _ in range(2))
    ours_model.set_experts_implementation("eager")
    plain_model.set_experts_implementation("eager")
    attach(ours_model, POLICY)
    captured = [_experts_call(model) for model in (exact_model, plain_model, ours_model)]
    exact, plain, ours = (run(dtype) for run in captured)
    for name, expected in exact.items():
        assert_reordered(ours[name], plain[name], expected, length=256, what=f"{family} {name}")


def _experts_call(model: Any) -> Any:
    """Run the last block's experts alone on rows that are equal in all models; gives output and gradients."""
    experts = next(
        m for n, m in reversed(list(model.named_modules())) if n.endswith("experts") and hasattr(m, "gate_up_proj")
    )

    def run(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        held = experts.gate_up_proj.dtype
        rows = torch.randn((24, 32), generator=generator, dtype=torch.float64).to(dtype).to(held).requires_grad_()
        ids = torch.rand((24, 8), generator=generator).topk(2).indices
        weights = torch.rand((24, 2), generator=generator, dtype=torch.float64).to(dtype).to(held).requires_grad_()
        upstream = torch.randn((24, 32), generator=generator, dtype=torch.float64).to(dtype).to(held)
        out = experts(rows, ids, weights)
        wanted = {"rows": rows, "weights": weights, **dict(experts.named_parameters())}
        grads = torch.autograd.grad(out, list(wanted.values()), upstream)
        return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}

    return run


COVERING = [
    ("qwen3_moe", 2, True), ("mixtral", 4, False), ("olmoe", 2, False), ("gpt_oss", 4, True),
    ("glm4_moe", 2, True), ("deepseek_v3", 4, True), ("gpt_oss", 2, False), ("deepseek_v3", 2, False),
    ("mixtral", 1, True),
]  # fmt: skip
GRID = list(itertools.product(FAMILIES, (1, 2, 4), (False, True)))


def check(cases: list[tuple[str, int, bool]]) -> None:
    results = run_ranks(on_ranks.family_steps, 4, cases, timeout_s=120.0)
    exact = {family: truth(family, 4) for family in {case[0] for case in cases}}
    for index, (family, expert_ranks, again) in enumerate(cases):
        what = f"{family}, E_p {expert_ranks}{', checkpointed' if again else ''}"
        assert_equal(results[0][index]["gradients"], exact[family], exact[family], what)
        for rank in results:
            assert set(rank[index]["forwards"]) == set(rank[index]["backwards"]) == {1}, what


def test_experts_over_ranks_with_fsdp_on_the_complement_equal_one_dense_process() -> None:
    check(COVERING)


def test_plain_expert_parallelism_equals_one_dense_process() -> None:
    exact = truth("qwen3_moe", 4)
    ours = run_ranks(on_ranks.plain_family_step, 4, "qwen3_moe", timeout_s=120.0)[0]
    assert_equal(ours, exact, exact, "plain")


@pytest.mark.slow
def test_the_whole_grid_of_families_equals_one_dense_process() -> None:
    for start in range(0, len(GRID), 12):
        check(GRID[start : start + 12])
