"""State dicts: exact continuation, no cast, torch.optim.AdamW both ways, refusals that change nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from steppe.core.errors import CheckpointError
from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from tests.support.exactness import assert_bitwise, assert_reordered

from .programs import DTYPES, assert_same, give, gradients, hazardous, parameters, train

SHAPES = ((30, 7), (5,), (), (0, 3))


def _continue(held: list[nn.Parameter], optimizer: OffloadStreamAdamW, first: int, last: int) -> None:
    for step in range(first, last):
        give(held, step)
        optimizer.step()


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Through a file, as a checkpoint would."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["weights first", "state first"])
def test_a_state_loaded_elsewhere_continues_with_the_same_bits(dtype: torch.dtype, order: str) -> None:
    held, optimizer = train(dtype, 3, shapes=SHAPES, max_norm=1.0)
    weights, state = [p.detach().clone() for p in held], _saved(optimizer)
    other = parameters(dtype, SHAPES, seed=9)
    loaded = OffloadStreamAdamW(other, lr=7.0, bucket_bytes=4096, update="device", max_norm=1.0, wiring=hazardous())

    def load_weights() -> None:
        with torch.no_grad():
            for parameter, weight in zip(other, weights):
                parameter.copy_(weight)

    if order == "weights first":
        load_weights()
    loaded.load_state_dict(state)
    if order == "state first":
        load_weights()
    _continue(held, optimizer, 3, 6)
    _continue(other, loaded, 3, 6)
    assert_same((other, loaded), (held, optimizer))
    assert loaded.param_groups[0]["lr"] == 1e-2, "hyper-parameters are the saved ones"


def test_a_state_loaded_into_its_own_optimizer_changes_nothing() -> None:
    held, optimizer = train(torch.bfloat16, 2)
    twin = train(torch.bfloat16, 2)
    optimizer.load_state_dict(optimizer.state_dict())
    _continue(held, optimizer, 2, 4)
    _continue(*twin, 2, 4)
    assert_same((held, optimizer), twin)


def test_loading_never_casts_and_goes_straight_into_the_slabs() -> None:
    held, optimizer = train(torch.bfloat16, 2)
    addresses = {p: optimizer.state[p]["exp_avg"].data_ptr() for p in held}
    optimizer.load_state_dict(_saved(optimizer))
    for parameter in held:
        entry = optimizer.state[parameter]
        assert {entry[key].dtype for key in ("exp_avg", "exp_avg_sq", "master")} == {torch.float32}
        assert entry["exp_avg"].data_ptr() == addresses[parameter]
        assert entry["exp_avg"].device.type == "cpu"


def test_a_state_of_torchs_adamw_continues_here() -> None:
    torch.manual_seed(0)
    held = parameters(torch.float32, SHAPES)
    plain = torch.optim.AdamW(held, lr=1e-2, foreach=False)
    for step in range(3):
        give(held, step)
        plain.step()
    other = parameters(torch.float32, SHAPES, seed=4)
    with torch.no_grad():
        for mine, theirs in zip(other, held):
            mine.copy_(theirs)
    optimizer = OffloadStreamAdamW(other)
    optimizer.load_state_dict(_saved(plain))
    for mine, theirs in zip(other, held):
        assert_bitwise(optimizer.state[mine]["exp_avg"], plain.state[theirs]["exp_avg"])
        assert_bitwise(optimizer.state[mine]["master"], theirs.detach())
        assert int(optimizer.state[mine]["step"]) == 3
    truths = [_float64(plain.state[p], p) for p in held]
    _continue(other, optimizer, 3, 4)
    give(held, 3)
    plain.step()
    for mine, theirs, truth, gradient in zip(other, held, truths, gradients(held, 3)):
        reference.step(truth, gradient, reference.Adam(lr=1e-2))
        exact = torch.from_numpy(np.array(truth.master))
        assert_reordered(mine.detach(), theirs.detach(), exact, length=1, what="one step from torch's state")


def _float64(entry: dict[str, torch.Tensor], parameter: torch.Tensor) -> reference.State:
    state = reference.state_of(parameter, np.float64)
    state.t = int(entry["step"])
    state.exp_avg, state.exp_avg_sq = (entry[key].double().numpy().copy() for key in ("exp_avg", "exp_avg_sq"))
    return state


def test_a_state_continues_in_torchs_adamw() -> None:
    held, optimizer = train(torch.float32, 3, shapes=SHAPES)
    other = [nn.Parameter(p.detach().clone()) for p in held]
    plain = torch.optim.AdamW(other, lr=1.0)
    plain.load_state_dict(_saved(optimizer))
    assert plain.param_groups[0]["lr"] == 1e-2
    for mine, theirs in zip(held, other):
        assert_bitwise(plain.state[theirs]["exp_avg_sq"], optimizer.state[mine]["exp_avg_sq"].clone())
    give(other, 3)
    plain.step()
    assert all(int(plain.state[p]["step"]) == 4 for p in other)


def test_16_bit_moments_of_torchs_adamw_widen_exactly() -> None:
    held = parameters(torch.bfloat16, SHAPES)
    plain = torch.optim.AdamW(held, lr=1e-2)
    give(held, 0)
    plain.step()
    optimizer = OffloadStreamAdamW(held)
    optimizer.load_state_dict(_saved(plain))
    for parameter in held:
        assert plain.state[parameter]["exp_avg"].dtype == torch.bfloat16
        assert_bitwise(optimizer.state[parameter]["exp_avg"], plain.state[parameter]["exp_avg"].float())


def test_a_round_trip_before_the_first_step_allocates_nothing_and_changes_nothing() -> None:
    held = parameters(torch.bfloat16)
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    optimizer.load_state_dict(optimizer.state_dict())
    assert "host_state_bytes" not in optimizer.stats()
    _continue(held, optimizer, 0, 3)
    assert_same((held, optimizer), train(torch.bfloat16, 3))


def test_distributed_checkpoint_reads_a_state_before_the_first_step_without_stepping() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    twin = copy.deepcopy(model)
    optimizer, plain = OffloadStreamAdamW(model.parameters()), OffloadStreamAdamW(twin.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert all(float(entry["step"]) == 0.0 for entry in state["state"].values())
    for each, steps in ((model, optimizer), (twin, plain)):
        each(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        steps.step()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert_bitwise(mine, theirs, "asking for the state was not a step")


def test_distributed_checkpoint_sets_a_state() -> None:
    held, optimizer = train(torch.bfloat16, 2, shapes=SHAPES)
    holder, other = nn.ParameterList(held), nn.ParameterList(parameters(torch.bfloat16, SHAPES, seed=2))
    saved = copy.deepcopy(get_optimizer_state_dict(holder, optimizer))
    loaded = OffloadStreamAdamW(other.parameters())
    with torch.no_grad():
        for mine, theirs in zip(other, held):
            mine.copy_(theirs)
    set_optimizer_state_dict(other, loaded, saved)
    assert_same((list(other), loaded), (held, optimizer))


def test_frozen_parameters_have_neither_state_nor_master() -> None:
    held = parameters(torch.bfloat16, SHAPES)
    held[0].requires_grad_(False)
    optimizer = OffloadStreamAdamW(held)
    optimizer.materialize()
    assert held[0] not in optimizer.state
    assert len(optimizer.state_dict()["state"]) == len(held) - 1
    held[0].requires_grad_(True)
    give(held, 0)
    optimizer.step()
    assert int(optimizer.state[held[0]]["step"]) == 1, "an unfrozen parameter gets its state at its first step"


def test_the_state_has_the_parameters_shape_and_strides() -> None:
    held, optimizer = train(torch.float32, 1)
    for parameter in held[:-1]:
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
        assert_bitwise(optimizer.state[parameter]["master"], parameter.detach())


def test_state_dict_hooks_run() -> None:
    _, optimizer = train(torch.float32, 1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before save"))
    optimizer.register_state_dict_post_hook(lambda _, __: seen.append("after save"))
    optimizer.register_load_state_dict_pre_hook(lambda _, __: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before save", "after save", "before load", "after load"]


Spoil = Callable[[dict[str, Any]], object]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "another model's shapes": (lambda s: s["state"][0].update(exp_avg=torch.zeros(3, 3)), r"exp_avg of parameter 0"),
    "another model's groups": (lambda s: s["param_groups"][0]["params"].pop(), "parameters a group"),
    "two groups": (lambda s: s["param_groups"].append(s["param_groups"][0]), "parameters a group"),
    "a truncated entry": (lambda s: s["state"][1].pop("exp_avg_sq"), "saved state of parameter 1"),
    "a missing entry": (lambda s: s["state"].pop(1), "truncated"),
    "a stranger's entry": (lambda s: s["state"].update({99: s["state"][0]}), "no parameter"),
    "AMSGrad": (lambda s: s["param_groups"][0].update(amsgrad=True), "AMSGrad"),
    "Adam": (lambda s: s["param_groups"][0].update(decoupled_weight_decay=False), "Adam or AMSGrad"),
    "momentum": (lambda s: s["state"][0].update(momentum_buffer=torch.zeros(())), "momentum_buffer"),
    "float64 moments": (lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg"].double()), "never|float32"),
    "half a step": (lambda s: s["state"][0].update(step=torch.tensor(0.5)), "whole number"),
    "a step of nan": (lambda s: s["state"][0].update(step=float("nan")), "whole number"),
    "no tensor": (lambda s: s["state"][0].update(exp_avg=None), "exp_avg of parameter 0"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_wrong_state_is_refused_and_nothing_changes(kind: str) -> None:
    spoil, told = SPOILED[kind]
    held, optimizer = train(torch.bfloat16, 2, shapes=SHAPES)
    twin = train(torch.bfloat16, 2, shapes=SHAPES)
    saved = copy.deepcopy(train(torch.bfloat16, 5, lr=0.5, shapes=SHAPES)[1].state_dict())
    spoil(saved)
    with pytest.raises(CheckpointError, match=told):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    _continue(held, optimizer, 2, 3)
    _continue(*twin, 2, 3)
    assert_same((held, optimizer), twin)


def test_an_optimizer_is_not_pickled_without_a_word() -> None:
    _, optimizer = train(torch.float32, 1)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize("settings", [{}, {"update": "device"}], ids=str)
def test_a_master_that_is_read_after_weights_were_written_is_not_stale(settings: dict[str, Any]) -> None:
    held, optimizer = train(torch.bfloat16, 2, **settings)
    kept = optimizer.state[held[0]]["master"].clone()
    with torch.no_grad():
        held[0][3] = 7.0
    read = optimizer.state[held[0]]["master"].clone()
    assert_bitwise(read, optimizer.state_dict()["state"][0]["master"])
    assert bool((read[3] == 7.0).all())
    assert_bitwise(read[4:], kept[4:], "untouched elements keep their extra bits")
    assert optimizer.stats()["refreshed_elements"] == held[0].shape[1]


def test_reading_the_state_between_loading_it_and_the_weights_loses_no_bit() -> None:
    saved, source = train(torch.bfloat16, 2)
    held = parameters(torch.bfloat16, seed=5)
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    optimizer.load_state_dict(_saved(source))
    optimizer.state[held[0]]["master"].sum()
    with torch.no_grad():
        for parameter, value in zip(held, saved):
            parameter.copy_(value)
    _continue(held, optimizer, 2, 4)
    assert_same((held, optimizer), train(torch.bfloat16, 4))
