"""Ring-DTP in Hugging Face models under FSDP2: gradients of all parameters, evaluation, generation, and back."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.errors import ConflictError
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


@pytest.mark.parametrize("tied", [False, True])
def test_a_deep_copy_of_a_model_runs_on_its_own_parameters(tied: bool) -> None:
    ids, labels = _batch(1)
    ours, plain = (toy_model(FAMILY, vocab_size=251, tie_word_embeddings=tied) for _ in range(2))
    loss = RingDTPLoss(ours)
    twin = copy.deepcopy(ours)
    assert inspect.signature(twin.forward) == inspect.signature(plain.forward)
    for model in (twin, plain):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        model(input_ids=ids, labels=labels).loss.backward()
    assert loss.stats().calls == 0
    assert all(p.grad is None for p in ours.parameters())
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) is tied
    for (name, mine), near in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert_reordered(mine.grad, near.grad, near.grad.double(), length=ids.numel() * 251, what=name)
    truth = plain(input_ids=ids).logits
    assert_reordered(twin(input_ids=ids).logits, truth, truth.double(), length=251, what="logits")
    twin.loss_function.detach()
    assert_bitwise(twin(input_ids=ids).logits, truth, "logits of the copy after detach")
    assert ours(input_ids=ids, labels=labels).logits is None  # the first model keeps its loss
    assert loss.stats().calls == 1


def check_copies(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    ids, labels = _batch(world_size)
    ours = toy_model(FAMILY, vocab_size=251, tie_word_embeddings=True)
    RingDTPLoss(ours, mesh=init_device_mesh("cpu", (world_size,)))
    twin = copy.deepcopy(ours)
    for model in (ours, twin):
        model(input_ids=ids, labels=labels).loss.backward()
    assert ours.lm_head.weight is not twin.lm_head.weight
    assert_bitwise(twin.lm_head.weight.grad.to_local(), ours.lm_head.weight.grad.to_local())
    twin.loss_function.detach()
    assert twin.lm_head.weight.shape == (251, 32) and type(ours.lm_head.weight.data) is not torch.Tensor


def test_a_deep_copy_of_a_sharded_model_stays_sharded() -> None:
    run_ranks(check_copies, 2)


def test_a_second_loss_on_a_model_is_refused_until_the_first_is_detached() -> None:
    ids, labels = _batch(1)
    model = toy_model(FAMILY, vocab_size=251)
    before = model(input_ids=ids, labels=labels).loss
    first = RingDTPLoss(model)
    with pytest.raises(ConflictError, match=r"already.*Remedy: detach\(\)"):
        RingDTPLoss(model)
    first.detach()
    RingDTPLoss(model).detach()
    assert_bitwise(model(input_ids=ids, labels=labels).loss, before)


def test_a_model_with_its_loss_attached_is_not_pickled() -> None:
    model = toy_model(FAMILY, vocab_size=251)
    loss = RingDTPLoss(model)
    with pytest.raises(ConflictError, match="state_dict"):
        torch.save(model, io.BytesIO())
    loss.detach()
    torch.save(model, io.BytesIO())


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
