"""Joining live models and leaving them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from steppe import OFF, SCO, BoundaryPolicy
from steppe.compose import flatten_peaks
from steppe.core.errors import ConfigError, ConflictError
from steppe.flatteners.boundary import attach as boundary
from tests.flatteners.boundary.programs import (
    ALL,
    Language,
    Stack,
    assert_same,
    gradients,
    inputs_of,
    plainly,
    rough_sco,
    seeded,
    with_sco,
)


def test_trainer_switching_checkpointing_on_again_keeps_sco():
    model = seeded(Language)
    sco = rough_sco()
    with_sco(model, sco)
    if hasattr(model.model, "activation_checkpointing_enable"):
        model.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients(model)
    assert sco.stats().boundaries == 4
    assert sco.stats().bytes_offloaded > 0
    sco.close()


def test_switching_checkpointing_off_on_purpose_pauses_sco():
    model = seeded(Language)
    sco = rough_sco()
    with_sco(model, sco)
    model.model.gradient_checkpointing_disable()
    gradients(model)
    assert sco.stats().boundaries == 0
    model.model.gradient_checkpointing_enable()
    gradients(model)
    assert sco.stats().boundaries == 4
    sco.close()


@pytest.mark.parametrize("make", [Stack, Language], ids=["stack", "qwen3_moe"])
def test_detach_leaves_the_model_as_it_was(make):
    model = seeded(make)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    plain = gradients(model)
    sco = rough_sco()
    with_sco(model, sco)
    gradients(model)
    sco.detach()
    boundaries = sco.stats().boundaries
    assert_same(gradients(model), plain)
    assert sco.stats().boundaries == boundaries
    for name, module in model.named_modules():
        changed = {key for key in vars(module) if key not in before[name] and key != "_gradient_checkpointing_func"}
        assert changed <= {"gradient_checkpointing"}, (name, changed)
        assert not getattr(module, "gradient_checkpointing", False)
    with_sco(model, sco)
    gradients(model)
    assert sco.stats().boundaries == 2 * boundaries
    sco.close()


def test_a_graph_in_flight_survives_detach():
    model = seeded(Stack)
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(inputs_of(model))
    sco.detach()
    loss.backward()
    assert_same({"loss 1": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}, plain)


def test_blocks_may_be_given_by_hand_and_hooks_stay_outside_the_recompute():
    model = seeded(Stack)
    calls = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: calls.append(module))
    sco = SCO(ALL).apply(model.layers)
    gradients(model)
    assert len(calls) == 5  # hooks of the module run once, in forward only
    assert sco.stats().boundaries == 5
    sco.close()


def test_frozen_embeddings_still_leave_the_device():
    """As under LoRA: the first boundary needs no gradient and is moved all the same."""
    model = seeded(Language)
    model.model.get_input_embeddings().requires_grad_(False)
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    assert_same(gradients(model), plain)
    assert sco.stats().left_alone == {}
    assert sco.stats().bytes_offloaded == 3 * (48 * 32 * 4 + 48 * 2 * 4)
    sco.close()


def test_the_order_of_the_blocks_is_that_of_their_boundaries():
    model = seeded(Language)
    sco = SCO(BoundaryPolicy(per_boundary={1: "keep"}, min_bytes=0))
    with_sco(model, sco)
    gradients(model)
    assert (sco.stats().kept, sco.stats().offloaded) == (1, 3)
    assert sco.stats().bytes_offloaded == 2 * (48 * 32 * 4 + 48 * 2 * 4) + 48 * 2 * 4  # the kept one's choice, too
    sco.close()


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), [], [3]], ids=["no list", "empty", "no modules"])
def test_what_has_no_blocks_is_refused(wrong):
    with pytest.raises(ConfigError, match="pass the blocks"):
        SCO().apply(wrong)


def test_two_lists_of_blocks_are_refused_and_one_inside_another_is_not():
    inner = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    )
    assert SCO().apply(inner) is not None
    both = nn.ModuleDict({"a": Stack().layers, "b": Stack().layers})
    with pytest.raises(ConfigError, match="2 lists"):
        SCO().apply(both)


def test_a_second_apply_is_refused():
    sco = SCO().apply(seeded(Stack))
    with pytest.raises(ConfigError, match="detach"):
        sco.apply(seeded(Stack))


def test_a_recomputed_boundary_that_nobody_makes_is_refused():
    sco = SCO(BoundaryPolicy(per_boundary={1: "recompute"}, min_bytes=0))
    hidden = torch.randn(4, 8, requires_grad=True)
    out = sco.at(0)(torch.sin, hidden * 1.0)
    with pytest.raises(ConfigError, match="no output of the previous block"):
        sco.at(1)(torch.sin, out * 2.0)


def test_a_boundary_beyond_the_last_block_is_refused_and_nothing_stays_applied():
    model = seeded(Stack)
    sco = SCO(BoundaryPolicy(min_bytes=0, per_boundary={9: "keep"}))
    with pytest.raises(ConfigError, match=r"boundary 9 of 5 blocks; allowed: 0 to 4"):
        sco.apply(model)
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_recompute_of_boundaries_without_numbers_says_how_to_number_them():
    sco = SCO(BoundaryPolicy(default="recompute", min_bytes=0))
    with pytest.raises(ConfigError, match=r"sco\.at\(index\)"):
        sco.checkpoint(torch.nn.Linear(4, 4), torch.ones(2, 4))


def test_a_short_micro_batch_among_others_is_no_reason_to_stop():
    model = seeded(Stack)
    sco = SCO(BoundaryPolicy(min_bytes=1024)).apply(model)
    model(torch.randn(32, 16)).backward()
    moved = sco.stats().bytes_offloaded
    assert moved > 0
    model(torch.randn(2, 16)).backward()
    assert sco.stats().bytes_offloaded == moved
    sco.close()


def test_a_first_batch_of_tiny_boundaries_is_refused():
    model = seeded(Stack)
    SCO(BoundaryPolicy(min_bytes=1 << 20)).apply(model)
    with pytest.raises(boundary.IdleOffloadError, match="tiny"):  # min_bytes is too high for this model
        model(torch.randn(32, 16))


@pytest.mark.parametrize("make", [Stack, Language], ids=["stack", "qwen3_moe"])
def test_a_second_sco_on_one_model_is_refused_until_the_first_one_leaves(make):
    model = seeded(make)
    first, second = SCO(ALL).apply(model), SCO(ALL)
    with pytest.raises(ConfigError, match="another SCO"):
        second.apply(model)
    first.detach()
    second.apply(model).detach()


def test_a_block_that_is_used_three_times_is_joined_once():
    block = nn.Linear(16, 16)
    blocks = [block] * 3
    hidden = torch.randn(32, 16, requires_grad=True)
    plain = torch.autograd.grad(block(block(block(hidden))).sum(), [hidden, block.weight])
    sco = SCO(ALL).apply(blocks)
    ours = torch.autograd.grad(block(block(block(hidden))).sum(), [hidden, block.weight])
    assert sco.stats().boundaries == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    sco.close()
    assert "forward" not in vars(block)


@pytest.mark.parametrize("policy", ["offload", {"default": "keep"}, OFF])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ConfigError, match="a BoundaryPolicy"):
        SCO(policy)


@pytest.mark.parametrize("plan", [None, "boundary", {"boundary": None}, {"boundary": "on"}, {"boundary": {}}])
def test_a_plan_that_is_none_is_refused(plan):
    with pytest.raises(ConfigError, match=r"steppe\.OFF|BoundaryPolicy"):
        flatten_peaks(seeded(Stack), plan)


def test_an_unknown_compiler_is_refused_at_once():
    with pytest.raises(ConfigError, match="inductor"):
        SCO(BoundaryPolicy(compile="block", compile_backend="nope"))


def test_off_attaches_nothing_and_a_policy_attaches_sco():
    model = seeded(Stack)
    assert boundary.attach(model, OFF) is None
    joined = boundary.attach(model, ALL)
    gradients(model)
    assert joined is not None
    assert joined.stats().bytes_offloaded > 0
    joined.close()


def test_conflicts_name_what_would_undo_the_work():
    class CheckpointWrapper(nn.Module):
        pass

    class OptimizedModule(nn.Module):
        pass

    model = nn.Sequential(CheckpointWrapper())
    found = boundary.conflicts(model, torch.autograd.graph.save_on_cpu(), OptimizedModule())
    assert [c.what.split()[0] for c in found] == ["CheckpointWrapper", "save_on_cpu", "torch.compile"]
    assert all(c.remedy for c in found)
    assert boundary.conflicts(seeded(Stack)) == ()


@pytest.mark.parametrize("make", [Stack, Language], ids=["stack", "qwen3_moe"])
def test_a_copy_of_a_joined_model_is_refused_since_it_would_run_the_original(make):
    model = seeded(make)
    sco = rough_sco()
    with_sco(model, sco)
    with pytest.raises(ConflictError, match="copy before apply"):
        copy.deepcopy(model)
    sco.detach()
    assert_same(gradients(copy.deepcopy(model)), gradients(model))
    sco.close()
