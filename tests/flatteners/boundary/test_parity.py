"""SCO's losses and gradients are, bit for bit, those of torch's own checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from steppe import SCO, BoundaryPolicy
from tests.flatteners.boundary.programs import (
    ALL,
    Block,
    Language,
    Pair,
    Stack,
    assert_same,
    gradients,
    plainly,
    rough_sco,
    seeded,
    with_sco,
)

SETTINGS = ("float32", "bfloat16", "dropout", "autocast")


def build(program: str, setting: str) -> torch.nn.Module:
    dropout = 0.2 if setting == "dropout" else 0.0
    if program == "qwen3_moe":
        model = seeded(lambda: Language(attention_dropout=dropout))
    else:
        model = seeded(lambda: Stack(dropout=dropout, kind=Pair if program == "tuples and keywords" else Block))
    return model.to(torch.bfloat16) if setting == "bfloat16" else model


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("program", ["stack", "tuples and keywords", "qwen3_moe"])
def test_gradients_are_bitwise_those_of_plain_checkpointing(program, setting):
    model = build(program, setting)
    autocast = setting == "autocast"
    undo = plainly(model)
    plain = gradients(model, seeds=(1, 2), autocast=autocast)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    assert_same(gradients(model, seeds=(1, 2), autocast=autocast), plain)
    stats = sco.stats()
    assert stats.bytes_offloaded > 0
    assert stats.reloads > 0
    sco.close()
    assert sco.stats().bytes_lent == 0


@pytest.mark.parametrize(
    "policy",
    [
        BoundaryPolicy("keep", min_bytes=0),
        BoundaryPolicy("recompute", min_bytes=0),
        BoundaryPolicy(per_boundary=("offload", "recompute", "recompute", "keep", "recompute"), min_bytes=0),
        BoundaryPolicy(per_boundary={1: "keep", 2: "offload", 3: "recompute"}, min_bytes=0),
        BoundaryPolicy(min_bytes=0, pin_topk=False),
    ],
    ids=["keep", "recompute", "mixed", "kept, then recomputed", "no pin"],
)
@pytest.mark.parametrize("program", ["stack", "qwen3_moe"])
def test_every_choice_gives_the_same_bits(program, policy):
    model = build(program, "dropout")
    undo = plainly(model)
    plain = gradients(model, seeds=(1, 2))
    undo()
    blocks = 5 if program == "stack" else 4
    policy = dataclasses.replace(policy, per_boundary=[pair for pair in policy.named if pair[0] < blocks])
    sco = rough_sco(policy)
    with_sco(model, sco)
    assert_same(gradients(model, seeds=(1, 2)), plain)
    choices = policy.choices(blocks)
    stats = sco.stats()
    assert (stats.offloaded, stats.kept, stats.recomputed) == tuple(
        2 * choices.count(choice) for choice in ("offload", "keep", "recompute")
    )
    assert (stats.replays > 0) == ("recompute" in choices)
    sco.close()


def test_any_function_can_be_checkpointed():
    weight = torch.randn(8, 8, requires_grad=True)
    start = torch.randn(5, 8)

    def step(hidden, scale, *, table):
        return (hidden @ weight * scale + table["shift"]).tanh()

    def run(checkpoint):
        hidden = start.clone().requires_grad_()
        out = hidden
        for scale in (1.0, 0.5, 2.0):
            out = checkpoint(step, out, scale, table={"shift": start})
        return torch.autograd.grad(out.sum(), (hidden, weight))

    from steppe.flatteners.boundary.reference import checkpointed

    sco = rough_sco()
    for ours, plain in zip(run(sco.checkpoint), run(checkpointed), strict=True):
        assert torch.equal(ours, plain)
    assert sco.stats().bytes_offloaded == 2 * start.numel() * 4
    sco.close()


def test_keyword_hidden_states_leave_the_device_too():
    model = build("tuples and keywords", "float32")
    sco = SCO(ALL)
    with_sco(model, sco)
    gradients(model)
    size = 24 * 16 * 4
    # Two streams a block; the first block's are the model's input, which needs no gradient and stays in the closure.
    assert sco.stats().bytes_offloaded == (5 - 2) * 2 * size
    sco.close()


def test_the_first_use_may_be_in_eval_or_inference_mode():
    model = build("stack", "float32")
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    from tests.flatteners.boundary.programs import inputs_of

    model.eval()
    with torch.inference_mode():
        sco.reserve([(24 * 16 * 4, 2)])
        model(inputs_of(model))
    with torch.no_grad():
        model(inputs_of(model))
    assert sco.stats().boundaries == 0
    model.train()
    assert_same(gradients(model), plain)
    sco.close()


def test_evaluating_a_transformers_model_first_changes_nothing():
    model = build("qwen3_moe", "float32")
    undo = plainly(model)
    plain = gradients(model)
    undo()
    sco = rough_sco()
    with_sco(model, sco)
    model.eval()
    with torch.inference_mode():
        model(torch.arange(8)[None])
    model.train()
    assert_same(gradients(model), plain)
    sco.close()
