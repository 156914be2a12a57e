"""Ring-DTP in Hugging Face models under FSDP2: gradients of all parameters, evaluation, generation, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steppe.flatteners.vocab.attach import RingDTPLoss
from steppe.flatteners.vocab.budget import VocabPolicy
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import FAMILIES, float64_model, toy_config, toy_model
from tests.support.ranks import run_ranks

FAMILY = "qwen3_moe"
TOKENS, ROWS = 12, 2  # a rank's batch is [ROWS, TOKENS]
LAYOUTS = {1: (1,), 2: (2, 1), 4: (4, 2)}  # ranks of the vocabulary group, for every number of ranks


def _batch(world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 251, (world_size * ROWS, TOKENS), generator=g)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=g) < 0.3] = -100
    labels[0] = -100  # a sequence, and with it most of a rank, without labels
    return ids, labels


def _config(tied: bool) -> Any:
    return toy_config(FAMILY, vocab_size=251, tie_word_embeddings=tied, output_router_logits=False)


def _plain_grads(tied: bool, world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = float64_model(_config(tied))
    ids, labels = _batch(world_size)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _sharded(model: nn.Module, loss: RingDTPLoss, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    ignored = loss.parameters
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def check_gradients(rank: int, world_size: int, tied: bool, vocab_ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (vocab_ranks,) if vocab_ranks == world_size else (world_size // vocab_ranks, vocab_ranks)
    axes = ("vocab",) if len(shape) == 1 else ("replicas", "vocab")
    model = float64_model(_config(tied))
    policy = VocabPolicy(tile_tokens=5, tile_vocab=11)
    loss = RingDTPLoss(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=axes), policy=policy)
    _sharded(model, loss, world_size)
    ids, labels = _batch(world_size)
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    output = model(input_ids=ids[own], labels=labels[own])
    assert output.logits is None
    output.loss.backward()
    total = output.loss.detach().clone()
    torch.distributed.all_reduce(total)
    expected, grads = _plain_grads(tied, world_size)
    length = ids.numel() * 251
    assert_reordered(total, expected, expected, length=length, what="loss")
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert found.keys() == grads.keys()
    for name, grad in found.items():
        assert_reordered(grad, grads[name], grads[name], length=length, what=f"{name}, P {vocab_ranks} of {world_size}")
    assert loss.stats().schedule == ("local" if vocab_ranks == 1 else "one_pass")


def check_layouts(rank: int, world_size: int) -> None:
    for vocab_ranks in LAYOUTS[world_size]:
        for tied in (False, True):
            check_gradients(rank, world_size, tied, vocab_ranks)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_of_all_parameters_equal_the_plain_models(world_size: int) -> None:
    run_ranks(check_layouts, world_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_calls_the_loss_and_gets_the_plain_models(family: str) -> None:
    ids, labels = _batch(1)
    plain, ours = toy_model(family), toy_model(family)
    RingDTPLoss(ours)
    results = []
    for model in (plain, ours):
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        results.append((output.loss, model.get_output_embeddings().weight.grad))
    for near, mine in zip(*results, strict=True):
        assert_reordered(mine, near, near.double(), length=256, what=family)


def check_evaluation(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    for tied, biased in ((False, False), (False, True), (True, False)):
        changes = {"vocab_size": 251, "tie_word_embeddings": tied}
        plain, ours = toy_model(FAMILY, **changes).eval(), toy_model(FAMILY, **changes).eval()
        if biased:
            for model in (plain, ours):
                model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, 251))
        before = {name: p.clone() for name, p in ours.named_parameters()}
        ids, labels = _batch(world_size)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        loss = RingDTPLoss(ours, mesh=init_device_mesh("cpu", (world_size,)))
        with torch.no_grad():
            truth = plain(input_ids=ids[own]).logits
            assert_reordered(ours(input_ids=ids[own]).logits, truth, truth.double(), length=251, what="logits")
            share = ours(input_ids=ids[own], labels=labels[own]).loss
            torch.distributed.all_reduce(share)
            mean = plain(input_ids=ids, labels=labels).loss
            assert_reordered(share, mean, mean.double(), length=251, what="loss")
        new = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(ours.generate(ids[own], **new), plain.generate(ids[own], **new))
        loss.detach()
        assert_bitwise(ours(input_ids=ids[own]).logits, plain(input_ids=ids[own]).logits, "logits after detach")
        assert_bitwise(ours(input_ids=ids[own], labels=labels[own]).loss, plain(ids[own], labels=labels[own]).loss)
        after = dict(ours.named_parameters())
        assert after.keys() == before.keys()
        for name, parameter in after.items():
            assert_bitwise(parameter, before[name], name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_and_generation_work_and_detach_puts_the_model_back(world_size: int) -> None:
    run_ranks(check_evaluation, world_size)
