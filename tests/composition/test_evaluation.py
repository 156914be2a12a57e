"""Evaluation and generation with all four attached: another shape, no gradients, and training goes on as if nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steppe.compose import flatten_peaks
from steppe.core.errors import ConflictError
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations.float64 import float64_truth
from steppe.integrations.ulysses import Ulysses
from steppe.runtime import collectives
from tests.composition.programs import LABELS, ROWS, Seen, own, policies, tokens, whole
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

SHORT, NEW = 10, 4  # tokens of an evaluation's sequence, and those generated after it


def _evaluate(model: Any, rank: int, world_size: int, part: slice = slice(None)) -> Seen:
    """Loss over all ranks, logits and generated tokens of a shape that training never had."""
    model.eval()
    ids = torch.arange(world_size * SHORT).view(world_size, SHORT) * 5 % 256
    mine = ids[rank : rank + 1] if part == slice(None) else ids[:1, part]
    with torch.no_grad():
        count = world_size * (SHORT - 1) if part == slice(None) else SHORT - 1
        loss = model(input_ids=mine, labels=mine, num_items_in_batch=count, use_cache=False).loss.reshape(1)
        logits = model(input_ids=mine, use_cache=False).logits
        seen = {"loss": loss, "logits": logits}
        if part == slice(None):
            seen["generated"] = model.generate(mine, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    model.train()
    return seen


def _train_and_evaluate(rank: int, world_size: int, sequence: int, evaluate: bool) -> dict[str, Seen]:
    mesh = MeshShape(world_size, sequence, world_size, world_size)
    made = flatten_peaks(toy_model("qwen3_moe").train(), policies(NAMES), mesh=mesh)
    optimizer, seen = made.optimizer(0.01), {}
    part = slice(rank * SHORT // 2, (rank + 1) * SHORT // 2) if sequence > 1 else slice(None)
    if evaluate:
        seen = _evaluate(made.model, rank, world_size, part)
        collectives.all_reduce(seen["loss"], collectives.world())
    for step in range(2):
        ids = tokens(step)[own(mesh, rank)]
        made.model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            _evaluate(made.model, rank, world_size, part)
    weights = {name: whole(p) for name, p in made.model.named_parameters()}
    made.close()
    return {"seen": seen, "weights": weights}


@pytest.mark.parametrize(("world_size", "sequence"), [(1, 1), (2, 1), (2, 2)])
def test_an_evaluation_in_between_is_the_plain_one_and_changes_no_bit_of_training(
    world_size: int, sequence: int
) -> None:
    found = run_ranks(_train_and_evaluate, world_size, sequence, True)
    quiet = run_ranks(_train_and_evaluate, world_size, sequence, False)
    for name, value in quiet[0]["weights"].items():
        assert_bitwise(found[0]["weights"][name], value, name)
    plain, truth = toy_model("qwen3_moe"), float64_truth(toy_model("qwen3_moe"))
    if sequence > 1:
        whole_logits = torch.cat([one["seen"]["logits"] for one in found], dim=1)
        theirs, true = (_evaluate(model, 0, 1) for model in (plain, truth))
        assert_reordered(whole_logits, theirs["logits"], true["logits"], length=ROWS * 256, what="logits")
        assert_reordered(found[0]["seen"]["loss"], theirs["loss"], true["loss"], length=ROWS * 256, what="loss")
        return
    sides = [[_evaluate(model, rank, world_size) for rank in range(world_size)] for model in (plain, truth)]
    for one, theirs, true in zip(found, *sides, strict=True):
        assert_reordered(one["seen"]["logits"], theirs["logits"], true["logits"], length=256, what="logits")
        assert torch.equal(one["seen"]["generated"], theirs["generated"])
    loss, theirs, true = found[0]["seen"]["loss"], *(sum(each["loss"] for each in side) for side in sides)
    assert_reordered(loss, theirs, true, length=ROWS * 256, what="loss")


def test_a_cache_of_keys_is_refused_where_a_rank_has_a_slice_of_the_sequence() -> None:
    model = toy_model("qwen3_moe").eval()
    handle = Ulysses(model, None)
    with pytest.raises(ConflictError, match="before generating"), torch.no_grad():
        model.generate(torch.full((1, 4), 7), max_new_tokens=2, pad_token_id=0)
    handle.detach()
