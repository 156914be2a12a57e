"""The six model families with steppe attached, against the plain model in float64 on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from steppe.flatteners.dispatch.attach import _forced, _routes, attach
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.recognise import expert_modules
from steppe.flatteners.dispatch.shared import replace_forward
from steppe.integrations.transformers import checkpoint_blocks
from tests.flatteners.dispatch import on_ranks
from tests.flatteners.dispatch.on_ranks import Step
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
    # The products themselves: 1 forward, 2/3 recompute and 2 backward passes of every route, whatever the checkpoint.
    routes = sum(on_ranks.batch_of(r).numel() for r in range(2)) * 2 * len(layers)
    assert attached.stats()["counters"]["flops"] == round(routes * 6 * 32 * 16 * (3 + 2 / 3))


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


def one_process(step: Step, model: Any, routing: str, ranks: int) -> dict[str, torch.Tensor]:
    """Gradients of an unsharded model over the batches of all ranks, its experts' routes forced to the profile."""
    model.zero_grad()
    undo = [] if routing == "router" else _force(model, routing)
    grads = _step(model, ranks)
    for put_back in undo:
        put_back()
    return {name: grad.clone() for name, grad in grads.items()}


def _force(model: Any, profile: str) -> list[Callable[[], None]]:
    """What `attached.forced` does, for a model that nothing is attached to."""

    def forced(module: Any) -> Callable[[], None]:
        plain = module.forward

        def forward(rows: torch.Tensor, *routes: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            ids, weights = _routes(routes, named)
            return plain(rows, *_forced(profile, ids, weights, 8))

        return replace_forward(module, forward)

    return [forced(module) for module in expert_modules(model).values()]


def _others_as_one(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts and routers one by one, everything else as one vector: in bf16 some of it (biases of keys, to which a
    softmax is blind) is mostly noise, of a size that is chance."""
    ours = {name: grad for name, grad in grads.items() if ".experts." in name or "gate." in name or "router." in name}
    others = [grad.flatten() for name, grad in sorted(grads.items()) if name not in ours]
    return {**ours, "all others": torch.cat(others)}


ROUTINGS = ("router", "balanced", "95/1", "100/1")
FORCED = ("balanced", "95/1", "100/1")  # narrow dtypes: routers of two programs differ where scores are near
COVERING = [
    Step("qwen3_moe", 2, True, ("router", "95/1")),
    Step("mixtral", 4, False, ("router", "100/1"), tied=True),
    Step("olmoe", 2, False, ("router", "balanced")),
    Step("gpt_oss", 4, True, ("router", "95/1")),
    Step("glm4_moe", 2, True, ("balanced", "router")),
    Step("deepseek_v3", 4, True, ("router", "100/1")),
    Step("mixtral", 1, True, ("router", "95/1")),
]


def check(steps: list[Step]) -> None:
    """4 ranks against one dense process: all gradients, and one expert forward a layer and step."""
    results = run_ranks(on_ranks.family_steps, 4, steps, timeout_s=150.0)
    models: dict[Any, tuple[Any, Any]] = {}
    truths: dict[Any, Any] = {}
    for index, step in enumerate(steps):
        key = step.family, step.dtype, step.tied
        if key not in models:
            plain = on_ranks.whole_model(step)
            narrow = step.dtype != torch.float64
            models[key] = plain, float64_model(plain.config, plain.state_dict()).train() if narrow else plain
        for routing in step.routings:
            if (known := (*key, routing)) not in truths:
                near = one_process(step, models[key][0], routing, 4)
                narrow = step.dtype != torch.float64
                truths[known] = near, one_process(step, models[key][1], routing, 4) if narrow else near
            found = results[0][index]["gradients"][routing], *truths[known]
            if step.dtype == torch.bfloat16:
                found = tuple(map(_others_as_one, found))
            assert_equal(*found, f"{step} {routing}")
        for rank in results:
            assert set(rank[index]["forwards"]) == set(rank[index]["backwards"]) == {len(step.routings)}, step
            assert set(rank[index]["flipped"]) == {0}, step


def test_experts_over_ranks_with_fsdp_on_the_complement_equal_one_dense_process() -> None:
    check(COVERING)


def test_plain_expert_parallelism_equals_one_dense_process() -> None:
    exact = truth("qwen3_moe", 4)
    ours = run_ranks(on_ranks.plain_family_step, 4, "qwen3_moe", timeout_s=120.0)[0]
    assert_equal(ours, exact, exact, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("expert_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_grid_of_families_equals_one_dense_process(family: str, expert_ranks: int, tied: bool) -> None:
    """Checkpointed and not, four routings each."""
    check([Step(family, expert_ranks, again, ROUTINGS, tied=tied) for again in (False, True)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grid_of_families_in_narrow_dtypes_is_no_further_from_float64(family: str, dtype: torch.dtype) -> None:
    check([Step(family, ranks, again, FORCED, dtype) for ranks in (1, 2, 4) for again in (False, True)])
