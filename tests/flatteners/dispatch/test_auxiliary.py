"""The router's auxiliary loss: a model's own, over ranks, is the whole batch's; nothing of size [N, k, E] exists."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from steppe.flatteners.dispatch import router
from steppe.flatteners.dispatch.attach import attach
from steppe.flatteners.dispatch.budget import DispatchPolicy
from tests.flatteners.dispatch import on_ranks
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import float64_model, toy_config, toy_model
from tests.support.ranks import run_ranks

WITH_ONE = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")  # the families whose own forward adds an auxiliary loss
POLICY = DispatchPolicy(chunk_tokens=5)


def whole_batch(family: str, ranks: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Auxiliary loss and gradients of the plain float64 model over one padded batch of all ranks' tokens."""
    model = float64_model(toy_config(family)).train()
    on_ranks.spread_routers(model)
    batches = [on_ranks.batch_of(r)[0] for r in range(ranks)]
    ids = torch.nn.utils.rnn.pad_sequence(batches, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(b) for b in batches], batch_first=True)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
    losses = [
        on_ranks.cross_entropy_of(row[: len(b)], b, [c[None] for c in batches]) for row, b in zip(out.logits, batches)
    ]
    (sum(losses) + on_ranks.AUXILIARY * out.aux_loss).backward()
    return out.aux_loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(cases: list[tuple[str, int, bool]], ranks: int) -> None:
    by_rank = run_ranks(on_ranks.auxiliary_steps, ranks, cases, timeout_s=120.0)
    exact = {family: whole_batch(family, ranks) for family in {case[0] for case in cases}}
    for index, (family, expert_ranks, flattened) in enumerate(cases):
        loss, gradients = exact[family]
        what = f"{family}, E_p {expert_ranks}, {'flattened' if flattened else 'plain'}"
        total = sum(rank[index]["auxiliary"] for rank in by_rank)
        assert_reordered(total, loss, loss, length=256, what=f"auxiliary loss of {what}")
        found = by_rank[0][index]["gradients"]
        assert found.keys() == gradients.keys()
        for name, expected in gradients.items():
            assert_reordered(found[name], expected, expected, length=256 * 32, what=f"{what}, {name}")


def test_the_auxiliary_loss_of_uneven_ranks_and_its_gradients_are_the_whole_batchs() -> None:
    """Flattened or plain; the ranks' own losses, averaged, would be another number (test_attach)."""
    check([("qwen3_moe", 2, True), ("gpt_oss", 2, True), ("mixtral", 1, True), ("olmoe", 2, False)], 2)


@pytest.mark.slow
def test_the_auxiliary_loss_over_four_ranks_is_the_whole_batchs() -> None:
    check([(f, e, on) for f in WITH_ONE for e in (1, 2, 4) for on in (True, False)], 4)


@pytest.mark.parametrize("family", WITH_ONE)
def test_on_one_rank_it_is_transformers_own_and_detach_gives_that_back(family: str) -> None:
    ids = on_ranks.batch_of(1)
    results: list[Any] = []
    model = toy_model(family).train()
    model.set_experts_implementation("eager")
    exact = float64_model(toy_config(family), model.state_dict()).train()
    code = sys.modules[type(model).__module__]
    theirs = code.load_balancing_loss_func
    for each, attached in ((model, False), (model, True), (exact, False)):
        handle = attach(each, POLICY) if attached else None
        each.zero_grad()
        auxiliary = each(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
        auxiliary.backward()
        router_weight = next(p for n, p in each.named_parameters() if n.endswith(("gate.weight", "router.weight")))
        results.append((auxiliary.detach(), router_weight.grad.clone()))
        assert code.load_balancing_loss_func is theirs  # other models of the family keep their own
        if handle is not None:
            handle.detach()
    plain, ours, truth = results
    for near, mine, true in zip(plain, ours, truth, strict=True):
        assert_reordered(mine, near, true, length=ids.numel() * 32, what=family)
    again = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss.detach()
    assert_bitwise(again, plain[0], "after detach")


def test_a_forward_that_raises_puts_transformers_function_back() -> None:
    model = toy_model("mixtral")
    attach(model, POLICY)
    code = sys.modules[type(model).__module__]
    theirs = code.load_balancing_loss_func
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[999]]), output_router_logits=True)
    assert code.load_balancing_loss_func is theirs


def test_a_model_with_its_auxiliary_loss_on_allocates_no_one_hot() -> None:
    shape = {"num_local_experts": 128, "output_router_logits": True, "num_hidden_layers": 4}
    model = toy_model("mixtral", **shape).train()
    attach(model, DispatchPolicy(chunk_tokens=64))
    ids = torch.randint(0, 256, (32, 32))

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = recorded.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    one_hot_of_a_layer = ids.numel() * 2 * 128 * 8
    logits = ids.numel() * 256 * 4
    assert logits <= largest < one_hot_of_a_layer


def test_a_dictionary_of_masks_and_no_logits_are_taken_as_transformers_means_them() -> None:
    """Packed documents come with masks for attention only, by kind."""
    logits = (torch.randn(24, 8),)
    masks = {"full_attention": torch.ones(1, 1, 24, 24)}
    assert_bitwise(router.batch_loss(logits, 8, 2, masks), router.batch_loss(logits, 8, 2))
    assert router.batch_loss(None, 8, 2) == 0
