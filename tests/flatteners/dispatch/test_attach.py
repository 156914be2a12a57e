"""Joining and leaving models: shared experts with a gate, registries, router loss and bias, conflicts."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from steppe.core.errors import ConfigError, ConflictError, ShapeError
from steppe.flatteners.dispatch import registry, router
from steppe.flatteners.dispatch.attach import attach, conflicts, diagnose
from steppe.flatteners.dispatch.budget import DispatchPolicy
from steppe.flatteners.dispatch.profiles import forced_routes
from steppe.integrations.transformers import checkpoint_blocks
from tests.flatteners.dispatch import on_ranks
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import float64_model, toy_config, toy_model
from tests.support.peaks import measured_peak
from tests.support.ranks import run_ranks

POLICY = DispatchPolicy(chunk_tokens=5)
IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], length: int = 256 * 32) -> None:
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        assert_reordered(ours[name], expected, expected, length=length, what=name)


def qwen2_moe() -> Any:
    """The family whose shared expert has a gate; it is not among the six."""
    sizes = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    common = {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    from transformers import AutoConfig

    config = AutoConfig.for_model("qwen2_moe", **common, **sizes, intermediate_size=64, max_position_embeddings=128)
    config._attn_implementation = "eager"
    return config


def test_a_gated_shared_expert_runs_first_and_experts_forward_once() -> None:
    model, plain = (float64_model(qwen2_moe()).train() for _ in range(2))
    attached = attach(model, POLICY)
    checkpoint_blocks(model)
    same(step(model), step(plain))
    assert [(s.forwards, s.recomputes) for s in attached.stats()["layers"]] == [(1, 1), (1, 1)]


def test_detach_gives_the_plain_model_back() -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        model = toy_model(family).train()
        model.set_experts_implementation("eager")
        before = step(model)
        attached = attach(model, POLICY)
        attached.detach()
        for name, grad in step(model).items():
            assert_bitwise(grad, before[name], name)
        assert not any("forward" in m.__dict__ for n, m in model.named_modules() if "expert" in n or n.endswith("mlp"))


def test_an_early_stop_leaves_no_shared_output_behind() -> None:
    model = float64_model(toy_config("deepseek_v3")).train()
    attach(model, POLICY)
    checkpoint_blocks(model)
    step(model)
    block = model.model.layers[1].mlp
    kept = [cell.cell_contents for cell in block.forward.forward.__closure__ if isinstance(cell.cell_contents, list)]
    assert kept == [[]]


def test_a_norm_behind_the_experts_costs_a_second_forward_and_the_report_says_so() -> None:
    model = float64_model(toy_config("qwen3_moe")).train()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        block = each.model.layers[0].mlp
        inner = block.forward
        block.forward = lambda hidden, inner=inner: nn.functional.layer_norm(inner(hidden), hidden.shape[-1:])
    attached = attach(model, POLICY)
    checkpoint_blocks(model)
    same(step(model), step(plain))
    stats = attached.stats()
    assert [s.forwards for s in stats["layers"]] == [2, 1]
    assert any("something behind the experts" in line for line in diagnose(stats))


def test_registered_experts_equal_eager_ones() -> None:
    registry.register(POLICY, name="pipelined_llep_test")
    for family in ("qwen3_moe", "gpt_oss", "glm4_moe"):
        model, plain = (toy_model(family).train() for _ in range(2))
        plain.set_experts_implementation("eager")
        model.set_experts_implementation("pipelined_llep_test")
        exact = float64_model(toy_config(family), plain.state_dict()).train()
        ours, theirs, truth = step(model), step(plain), step(exact)
        for name, expected in truth.items():
            if "experts." in name:
                assert_reordered(ours[name], theirs[name], expected, length=256 * 32, what=f"{family} {name}")


@pytest.mark.skipif(
    find_spec("transformers.distributed.expert_parallel") is None, reason="transformers 5.23 has the registry"
)
def test_registered_expert_parallelism_equals_one_process() -> None:
    model = toy_model("qwen3_moe").train()
    model.set_experts_implementation("eager")
    exact = float64_model(toy_config("qwen3_moe"), model.state_dict()).train()
    for each in (model, exact):
        for rank in range(2):
            on_ranks.summed_loss(each, on_ranks.batch_of(rank), 20).backward()
    ours = run_ranks(on_ranks.registered_ep, 2)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    plain, truth = (dict(m.named_parameters())[name].grad for m in (model, exact))
    assert_reordered(torch.cat(ours), plain, truth, length=256 * 32, what=name)


def test_the_auxiliary_loss_equals_transformers_own() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = [torch.randn(24, 8, dtype=torch.float32).requires_grad_() for _ in range(3)]
    mask = torch.ones(2, 12)
    mask[1, 7:] = 0
    for given in (None, mask):
        theirs = load_balancing_loss_func(tuple(logits), 8, 2, given)
        ours = router.auxiliary_loss(logits, 2, attention_mask=given)
        assert_reordered(ours.detach(), theirs.detach(), theirs.detach().double(), length=24 * 8 * 3)
        expected = torch.autograd.grad(theirs, logits)
        for a, b in zip(torch.autograd.grad(ours, logits), expected):
            assert_reordered(a, b, b.double(), length=24 * 8 * 3)


def test_the_auxiliary_loss_holds_no_one_hot_and_no_probabilities() -> None:
    logits = [torch.randn(8192, 64).requires_grad_() for _ in range(4)]
    peak = measured_peak(lambda: router.auxiliary_loss(logits, 8).backward())
    gradients = sum(t.numel() for t in logits) * 4
    one_hot = 4 * 8192 * 8 * 64 * 8
    assert gradients <= peak < 1.5 * gradients < one_hot / 8


def test_shares_of_the_auxiliary_loss_sum_up_to_the_global_one() -> None:
    shares = run_ranks(on_ranks.auxiliary_shares, 2)
    together = [torch.cat([on_ranks.router_logits(r)[layer] for r in range(2)]) for layer in range(2)]
    whole = router.auxiliary_loss(together, 2)
    total = sum(shares)
    assert_reordered(total, whole.detach(), whole.detach().double(), length=64)
    mean = sum(router.auxiliary_loss(on_ranks.router_logits(r), 2) for r in range(2)) / 2
    assert abs(float(mean - whole)) > 1e-3  # the mean of the ranks' own losses is another number


def test_router_logits_that_do_not_fit_their_mask_are_refused() -> None:
    with pytest.raises(ShapeError, match="mask"):
        router.auxiliary_loss([torch.randn(24, 8)], 2, attention_mask=torch.ones(2, 11))


@pytest.mark.parametrize("again", [False, True], ids=["plain", "checkpointed"])
def test_the_router_bias_moves_once_a_step_by_counts_that_recomputes_leave_alone(again: bool) -> None:
    model = toy_model("deepseek_v3").train()
    attached = attach(model, POLICY)
    if again:
        checkpoint_blocks(model)
    gate = model.model.layers[1].mlp.gate
    seen: list[torch.Tensor] = []
    hook = gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
    step(model)
    hook.remove()
    counts = attached.sessions["model.layers.1.mlp.experts"].telemetry.counts
    assert counts is not None
    assert (counts == torch.bincount(seen[0].reshape(-1), minlength=8).numpy()).all()
    assert attached.update_router_bias(0.5) == 1
    expected = 0.5 * torch.sign(torch.from_numpy(counts.mean() - counts)).float()
    assert_bitwise(gate.e_score_correction_bias, expected)
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    assert attached.update_router_bias(0.5) == 1  # nothing was counted: nothing moves
    assert_bitwise(gate.e_score_correction_bias, expected)


def test_a_forced_profile_overrides_the_routers_choice() -> None:
    model = toy_model("qwen3_moe").train()
    attached = attach(model, POLICY)
    for profile in ("balanced", "95/1"):
        attached.forced = profile
        assert step(model).keys() == dict(model.named_parameters()).keys()
        counts = attached.sessions["model.layers.0.mlp.experts"].telemetry.take_counts()
        expected = forced_routes(profile, num_tokens=24, num_experts=8, num_choices=2)
        assert (counts == np.bincount(expected.reshape(-1), minlength=8)).all()
    attached.forced = None
    step(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_copy_of_a_joined_model_is_refused_since_it_would_run_the_original(family: str) -> None:
    model = toy_model(family)
    joined = attach(model, POLICY)
    with pytest.raises(ConflictError, match="copy before attaching"):
        copy.deepcopy(model)
    joined.detach()
    copy.deepcopy(model)


def test_models_without_recognised_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="without stacked experts"):
        attach(nn.Sequential(nn.Linear(4, 4)), POLICY)
    model = toy_model("qwen3_moe")
    model.model.layers[0].mlp.experts.has_gate = False
    with pytest.raises(ConfigError, match="has_gate = False"):
        attach(model, POLICY)


def test_conflicts_name_what_would_undo_the_work() -> None:
    model = toy_model("qwen3_moe")
    assert conflicts(model) == ()
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    assert "expert-parallel by transformers" in conflicts(model)[0].what
    assert "torch.compile" in conflicts(torch.compile(nn.Linear(2, 2)))[0].what


def test_another_activation_runs_through_the_modules_own_function() -> None:
    config = toy_config("qwen3_moe", hidden_act="gelu")
    model, plain = (float64_model(config).train() for _ in range(2))
    attach(model, POLICY)
    same(step(model), step(plain))


def test_generation_after_attach_gives_the_plain_models_tokens() -> None:
    model = AutoModelForCausalLM.from_config(toy_config("qwen3_moe")).eval()
    model.set_experts_implementation("eager")
    plain = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    attach(model, POLICY)
    assert torch.equal(model.generate(IDS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0), plain)
