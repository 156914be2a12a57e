"""One rank against the dense loop: forms, routings, dtypes, chunk sizes; bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import steppe
from steppe.core.errors import ConfigError, ShapeError, WorkingSetError
from steppe.flatteners.dispatch.gates import gate_of
from steppe.flatteners.dispatch.reference import checkpointed, dense_loop, plain_experts
from steppe.flatteners.dispatch.weights import ExpertWeights
from tests.flatteners.dispatch.cases import (
    FORMS,
    ROUTINGS,
    Case,
    assert_like_dense,
    flat,
    gradients,
    make_experts,
    make_inputs,
    new_session,
    whole,
)
from tests.support.exactness import assert_bitwise, assert_reordered

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def ours(case: Case, **pool: object) -> dict[str, torch.Tensor]:
    return gradients(flat(new_session(case, **pool)), make_experts(case), make_inputs(case, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, "biased"])
def test_every_gradient_equals_the_dense_loop(form: str, dtype: torch.dtype) -> None:
    for routing in ROUTINGS:
        case = Case(form, routing, dtype, tokens=(61,))
        assert_like_dense(case, [ours(case, poison=True)])


def test_more_choices_than_native_experts_are_exact() -> None:
    case = Case(routing="same_twice", experts=2, choices=5, tokens=(33,))
    assert_like_dense(case, [ours(case)])


def test_no_token_and_one_token_run_the_same_lines() -> None:
    for tokens in (0, 1):
        case = Case(tokens=(tokens,))
        assert_like_dense(case, [ours(case, poison=True)])


def test_float32_route_weights_keep_bf16_rows() -> None:
    case = Case(dtype=torch.bfloat16, weights_dtype=torch.float32, tokens=(61,))
    results = ours(case)
    assert results["out"].dtype == torch.bfloat16
    assert results["route_weights"].dtype == torch.float32
    assert_like_dense(case, [results])


def test_chunk_size_changes_no_output_and_no_gradient_beyond_rounding() -> None:
    for chunk_tokens in (1, 5, 61, 1000):
        case = Case(tokens=(61,), chunk_tokens=chunk_tokens)
        assert_like_dense(case, [ours(case)], f"chunks of {chunk_tokens}")


def test_sums_in_the_dtype_of_the_tokens_are_a_choice() -> None:
    case = Case(dtype=torch.bfloat16, tokens=(61,))
    session = new_session(case)
    session.policy = replace(case.policy, combine_dtype="tokens")
    inputs, experts = make_inputs(case, 0), make_experts(case)
    narrow = flat(session)(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts).detach()
    truth = whole(case, dense_loop, torch.float64)["out"]
    assert_reordered(narrow, whole(case, dense_loop)["out"], truth, length=case.choices)


def test_two_runs_give_the_same_bits() -> None:
    case = Case(dtype=torch.float32, tokens=(61,))
    first, second = ours(case), ours(case)
    for name, value in first.items():
        assert_bitwise(second[name], value, name)


def test_checkpointing_changes_no_bit_and_runs_the_experts_forward_once() -> None:
    case = Case(dtype=torch.float32, tokens=(61,))
    session = new_session(case)
    run = flat(session)
    again = gradients(lambda *a: checkpoint(run, *a, use_reentrant=False), make_experts(case), make_inputs(case, 0))
    for name, value in ours(case).items():
        assert_bitwise(again[name], value, name)
    stats = session.telemetry.read()
    assert (stats.forwards, stats.backwards, stats.recomputes, stats.flipped) == (1, 1, 1, 0)


def test_a_second_backward_through_a_kept_graph_gives_the_same_bits() -> None:
    case = Case(dtype=torch.float32)
    inputs, experts = make_inputs(case, 0), make_experts(case)
    out = flat(new_session(case))(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    wanted = (inputs.tokens, *experts.tensors)
    first = torch.autograd.grad(out, wanted, inputs.upstream, retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, wanted, inputs.upstream), first):
        assert_bitwise(a, b)


def test_two_forwards_before_two_backwards_do_not_mix() -> None:
    case, other = Case(tokens=(40,)), Case(tokens=(23,), routing="95/1")
    session, experts = new_session(case), make_experts(case)
    runs = [make_inputs(c, 0) for c in (case, other)]
    outs = [flat(session)(i.tokens, i.expert_ids, i.route_weights, experts) for i in runs]
    for c, inputs, out in zip((case, other), runs, outs):
        (grad,) = torch.autograd.grad(out, inputs.tokens, inputs.upstream)
        truth = whole(c, dense_loop)["tokens"]
        assert_reordered(grad, truth, truth, length=c.longest_sum)


def test_frozen_experts_and_frozen_tokens_get_none() -> None:
    case = Case()
    inputs, experts = make_inputs(case, 0), make_experts(case)
    for tensor in experts.tensors:
        tensor.requires_grad_(False)
    flat(new_session(case))(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts).sum().backward()
    assert inputs.tokens.grad is not None
    assert all(t.grad is None for t in experts.tensors)


def test_experts_without_rows_get_zero_gradients() -> None:
    case = Case(routing="all_to_one")
    results = ours(case, poison=True)
    assert not results["experts.0"][:-1].any()
    assert results["experts.0"][-1].any()


def test_forward_without_grad_saves_nothing() -> None:
    case = Case()
    inputs, experts = make_inputs(case, 0), make_experts(case)
    with torch.inference_mode():
        out = flat(new_session(case))(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    assert out.grad_fn is None
    truth = whole(case, dense_loop)["out"]
    assert_reordered(out, truth, truth, length=case.longest_sum)


def test_the_result_may_be_changed_in_place() -> None:
    case = Case()
    inputs, experts = make_inputs(case, 0), make_experts(case)
    out = flat(new_session(case))(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    out += inputs.tokens
    (grad,) = torch.autograd.grad(out, inputs.tokens, inputs.upstream)
    truth = whole(case, dense_loop)["tokens"] + inputs.upstream
    assert_reordered(grad, truth, truth, length=case.longest_sum)


def owned_experts(case: Case) -> ExpertWeights:
    experts = make_experts(case)
    gate_up, down = (torch.nn.Parameter(t.detach()) for t in experts.tensors)
    return replace(experts, gate_up=gate_up, down=down)


def test_the_module_owns_its_parameters_and_equals_the_function() -> None:
    case = Case()
    inputs = make_inputs(case, 0)
    module = steppe.PipelinedLLEP(owned_experts(case), policy=case.policy)
    assert sorted(name for name, _ in module.named_parameters()) == ["down", "gate_up"]
    module(inputs.tokens, inputs.expert_ids, inputs.route_weights).backward(inputs.upstream)
    assert module.gate_up.grad is not None
    assert_bitwise(module.gate_up.grad, ours(case)["experts.0"])


def test_the_modules_weights_follow_it_to_another_dtype() -> None:
    module = steppe.PipelinedLLEP(owned_experts(Case())).to(torch.float32)
    inputs = make_inputs(Case(), 0, torch.float32)
    assert module(inputs.tokens, inputs.expert_ids, inputs.route_weights).dtype == torch.float32


def test_the_baselines_agree_with_the_dense_loop() -> None:
    for form in FORMS:
        case = Case(form, tokens=(61,))
        truth = whole(case, dense_loop)
        for program in (plain_experts, lambda *a: checkpointed(plain_experts, *a)):
            for name, value in whole(case, program).items():
                assert_reordered(value, truth[name], truth[name], length=case.longest_sum, what=name)


BAD = {
    "ids out of range": (lambda i: i.expert_ids.fill_(99), ShapeError, "120 on rank 0"),
    "negative ids": (lambda i: i.expert_ids[:2].fill_(-1), ShapeError, "6 on rank 0"),
    "infinite weights": (lambda i: i.route_weights.detach()[3:4].fill_(float("nan")), ShapeError, "not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_routes_are_refused_in_words(name: str) -> None:
    spoil, error, words = BAD[name]
    case = Case()
    inputs = make_inputs(case, 0)
    spoil(inputs)
    with pytest.raises(error, match=words):
        flat(new_session(case))(inputs.tokens, inputs.expert_ids, inputs.route_weights, make_experts(case))


def test_bad_shapes_and_dtypes_are_refused_in_words() -> None:
    case = Case()
    i, experts, run = make_inputs(case, 0), make_experts(case), flat(new_session(case))
    for args in (
        (i.tokens[None], i.expert_ids, i.route_weights),
        (i.tokens.float(), i.expert_ids, i.route_weights),
        (i.tokens, i.expert_ids[:-1], i.route_weights),
        (i.tokens, i.route_weights, i.expert_ids),
        (i.tokens, i.expert_ids[:, :0], i.route_weights[:, :0]),
        (i.tokens, i.expert_ids.to(torch.int16), i.route_weights),
    ):
        with pytest.raises(ShapeError):
            run(*args, experts)
    with pytest.raises(ShapeError, match="transposed"):
        replace(experts, down=experts.down.transpose(1, 2))
    with pytest.raises(ConfigError, match="swish"):
        gate_of("swish")


@pytest.mark.parametrize("first", [5, 50])
def test_buffers_that_an_evaluation_made_serve_training(first: int) -> None:
    """Tensors made under inference mode can't be written outside of it, and the buffers outlive the call."""
    experts = steppe.ExpertWeights(*(torch.nn.Parameter(torch.ones(4, rows, 8)) for rows in (16, 8)))
    module = steppe.PipelinedLLEP(experts)
    inputs = {n: (torch.ones(n, 8), torch.arange(2 * n).view(n, 2) % 4, torch.full((n, 2), 0.5)) for n in (5, first)}
    module(*inputs[5]).sum().backward()
    fresh = steppe.PipelinedLLEP(experts)
    for each in (module, fresh):
        with torch.inference_mode():
            evaluated = each(*inputs[first])
        trained = each(*inputs[first])
        assert_bitwise(trained.detach(), evaluated.clone())
        trained.sum().backward()


@pytest.mark.parametrize("activation", [lambda gate, up: up * 1.0, lambda gate, up: torch.ones_like(gate)])
def test_an_activation_may_ignore_what_it_is_given(activation: Any) -> None:
    gate, up, grad, weight = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)).unbind()
    found = gate_of(activation).backward(gate, up, grad, weight)
    uses_up = activation(gate, up).equal(up)
    assert_bitwise(found.gate, torch.zeros_like(gate))
    assert_bitwise(found.up, grad * weight if uses_up else torch.zeros_like(up))


def test_more_tokens_than_declared_are_refused() -> None:
    case = Case()
    inputs = make_inputs(case, 0)
    with pytest.raises(WorkingSetError, match="got 40"):
        flat(new_session(case, max_tokens=39))(
            inputs.tokens, inputs.expert_ids, inputs.route_weights, make_experts(case)
        )


def test_policies_that_cannot_be_meant_are_refused() -> None:
    for bad in (
        {"chunk_tokens": 4, "micro_chunks": 2}, {"chunk_tokens": 0}, {"max_load": 0.9}, {"switch_ratio": 0.5},
        {"spill_slots": 3}, {"spill_slots": 0}, {"min_rows": -1}, {"ranks_per_node": 0}, {"combine_dtype": "half"},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            steppe.DispatchPolicy(**bad)
