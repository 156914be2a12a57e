"""Every subset of the four flatteners is the plain program: 16 rows, real models, several ranks and groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import steppe
from steppe.compose import flatten_peaks
from steppe.core.errors import ConfigError, ConflictError
from steppe.core.policy import OFF
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.integrations.float64 import float64_truth
from steppe.planner.plan import policy_class
from steppe.runtime import collectives
from tests.support.exactness import assert_reordered
from tests.support.float64 import FAMILIES, toy_model
from tests.support.ranks import run_ranks

ROWS, LENGTH, STEPS, LR = 4, 24, 3, 0.02
SUBSETS = [s for n in range(5) for s in itertools.combinations(NAMES, n)]
SMALL = {"dispatch": {"chunk_tokens": 7}, "boundary": {"min_bytes": 0}, "optimizer": {"bucket_bytes": 4096}}
MESHES = {1: [{}], 2: [{"expert": 2, "vocab": 2}, {"expert": 1, "vocab": 1}], 4: [{"expert": 2, "vocab": 4}]}


def _policies(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: policy_class(name)(**SMALL.get(name, {})) for name in names}


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def _losses_and_gradients(model: Any, rows: slice, optimizer: Any, reduce: Any) -> dict[str, torch.Tensor]:
    """Three AdamW steps; the losses of all steps and the first step's gradients."""
    seen: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        ids = _tokens(step)
        out = model(input_ids=ids[rows], labels=ids[rows], num_items_in_batch=ROWS * (LENGTH - 1), use_cache=False)
        out.loss.backward()
        seen[f"loss {step}"] = reduce(out.loss.detach().reshape(1).clone())
        if step == 0:
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                seen[name] = getattr(gradient, "full_tensor", gradient.clone)().detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _flattened(
    rank: int, world_size: int, family: str, names: tuple[str, ...], sizes: dict[str, int]
) -> dict[str, torch.Tensor]:
    model = toy_model(family).train()
    shape = MeshShape(world=world_size, **sizes)
    flattened = flatten_peaks(model, _policies(names), mesh=shape)
    optimizer = flattened.optimizer(LR, weight_decay=0.1)
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    group = collectives.world()
    found = _losses_and_gradients(model, own, optimizer, lambda loss: collectives.all_reduce(loss, group))
    assert flattened.stats().keys() >= set(names)
    flattened.detach()
    return found


_plain: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}


def _one_process(family: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The plain program on the whole batch, in float32 and in float64."""
    if family not in _plain:
        found = []
        for model in (toy_model(family).train(), float64_truth(toy_model(family)).train()):
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
            found.append(_losses_and_gradients(model, slice(None), optimizer, lambda loss: loss))
        _plain[family] = (found[0], found[1])
    return _plain[family]


def _judge(family: str, names: tuple[str, ...], world_size: int, sizes: dict[str, int]) -> None:
    ours = run_ranks(_flattened, world_size, family, names, sizes)[0]
    plain, truth = _one_process(family)
    assert ours.keys() == plain.keys() == truth.keys()
    for name, value in ours.items():
        # After AdamW's steps a loss is a function of every gradient: the sums behind it are as long as all of them.
        length = ROWS * LENGTH * 256 if name.startswith("loss") else ROWS * LENGTH * world_size
        assert_reordered(value, plain[name], truth[name], length=length, what=f"{family} {names} {name}")


@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_every_subset_trains_as_the_plain_program_on_two_ranks(names: tuple[str, ...]) -> None:
    family = FAMILIES[SUBSETS.index(names) % len(FAMILIES)]
    _judge(family, names, 2, MESHES[2][SUBSETS.index(names) % 2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 4])
def test_all_four_train_every_family_on_one_and_four_ranks(family: str, world_size: int) -> None:
    _judge(family, NAMES, world_size, MESHES[world_size][0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("names", SUBSETS, ids=lambda names: "+".join(names) or "none")
def test_the_full_grid(names: tuple[str, ...], world_size: int, family: str) -> None:
    for sizes in MESHES[world_size]:
        _judge(family, names, world_size, sizes)


def _refusals(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(ConfigError, match="these names"):
        flatten_peaks(toy_model("mixtral"), {"vocabulary": OFF})
    with pytest.raises(ConfigError, match="shape of 3 ranks"):
        flatten_peaks(toy_model("mixtral"), {}, mesh=MeshShape(world=3))
    model = toy_model("mixtral")
    fully_shard(model.model.layers[0])
    with pytest.raises(ConflictError, match="let flatten_peaks shard it"):
        flatten_peaks(model, _policies(NAMES))
    with pytest.raises(ConfigError, match=r"model\.layers"):
        flatten_peaks(torch.nn.Linear(2, 2), {})


def test_what_cannot_be_composed_is_refused() -> None:
    run_ranks(_refusals, 2)


def test_the_public_names_are_there() -> None:
    assert steppe.flatten_peaks is flatten_peaks
