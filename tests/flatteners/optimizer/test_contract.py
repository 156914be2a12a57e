"""What users of torch's optimizers rely on: closures, hooks, schedulers, groups, and weights that change under it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import steppe
from steppe.core.errors import ConfigError, HostMemoryError, ShapeError
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.engine import Wiring
from steppe.runtime.arena import Arena
from tests.support.exactness import assert_bitwise

from .programs import assert_same, give, parameters, train


def test_the_public_names_are_there() -> None:
    assert steppe.OffloadStreamAdamW is OffloadStreamAdamW
    assert steppe.OptimizerPolicy().slots == 2
    assert callable(steppe.clip_grad_norm_)
    assert issubclass(OffloadStreamAdamW, torch.optim.Optimizer)


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OffloadStreamAdamW([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert parameter.tolist() == pytest.approx([0.899] * 3)


def test_step_hooks_run_around_the_step() -> None:
    held = parameters(torch.float32)
    optimizer = OffloadStreamAdamW(held)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    give(held, 0)
    optimizer.step()
    assert seen == ["before", "after"]


def test_an_exception_in_a_step_hook_leaves_the_state_usable() -> None:
    held, optimizer = train(torch.float32, 1)

    def fail(*_: object) -> None:
        raise RuntimeError("a user's hook failed")

    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(fail)
        give(held, 1)
        with pytest.raises(RuntimeError, match="a user's hook failed"):
            optimizer.step()
        handle.remove()
    assert int(optimizer.state[held[0]]["step"]) == 2, "the post hook failed after a complete step"
    give(held, 2)
    optimizer.step()


def test_schedulers_set_the_rate_of_the_next_step() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = OffloadStreamAdamW(ours, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    by_hand = OffloadStreamAdamW(theirs, lr=0.1)
    for step in range(3):
        by_hand.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        scheduler.step()
        by_hand.step()
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert_same((ours, optimizer), (theirs, by_hand))


def test_a_tensor_learning_rate_is_read_at_each_step() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    rate = torch.tensor(0.1)
    optimizer, plain = OffloadStreamAdamW(ours, lr=rate), OffloadStreamAdamW(theirs, lr=0.1)
    for step in range(2):
        give(ours, step)
        give(theirs, step)
        optimizer.step()
        plain.step()
        rate.mul_(0.5)
        plain.param_groups[0]["lr"] = rate.item()
    for mine, other in zip(ours, theirs):
        assert_bitwise(mine, other)


def test_groups_keep_their_own_settings_and_later_groups_join() -> None:
    held = parameters(torch.float32)
    optimizer = OffloadStreamAdamW([{"params": held[:2], "lr": 0.5}], lr=1e-3)
    give(held[:2], 0)
    optimizer.step()
    optimizer.add_param_group({"params": held[2:], "weight_decay": 0.0})
    give(held, 1)
    optimizer.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 1e-3]
    assert [int(optimizer.state[p]["step"]) for p in held] == [2, 2, *[1] * (len(held) - 2)]


def test_named_parameters_are_accepted() -> None:
    model = nn.Linear(3, 3)
    optimizer = OffloadStreamAdamW(model.named_parameters())
    optimizer.materialize()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_maximize_climbs() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    OffloadStreamAdamW([parameter], lr=0.1, weight_decay=0.0, maximize=True).step()
    assert (parameter > 0.09).all()


def test_in_place_updates_are_seen_by_autograd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OffloadStreamAdamW([parameter])
    loss = parameter.square().sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- weights that change behind its back -----------------------------------------------------------------------------


def _copy(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _data_copy(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


def _data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value.clone()


@pytest.mark.parametrize("write", [_copy, _data_copy, _data])
@pytest.mark.parametrize("settings", [{}, {"update": "device"}, {"overlap_backward": True}], ids=str)
def test_weights_loaded_later_are_never_overwritten_by_stale_masters(write: Any, settings: dict[str, Any]) -> None:
    held, optimizer = train(torch.bfloat16, 2, **settings)
    fresh = parameters(torch.bfloat16, seed=5)
    for parameter, value in zip(held, fresh):
        write(parameter, value.detach())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    give(held, 2)
    optimizer.step()
    for parameter, value in zip(held, fresh):
        assert_bitwise(parameter.detach(), value.detach(), "a step of rate zero keeps the new weights")
    assert optimizer.stats()["refreshed_elements"] > 0


def test_untouched_elements_keep_the_extra_bits_of_their_masters() -> None:
    held, optimizer = train(torch.bfloat16, 2)
    before = optimizer.state[held[0]]["master"].clone()
    with torch.no_grad():
        held[0][0, 0] = 3.0
    assert optimizer.refresh_masters() == 1
    after = optimizer.state[held[0]]["master"]
    assert after[0, 0] == 3.0
    assert_bitwise(after.flatten()[1:], before.flatten()[1:])


def test_a_single_silent_write_is_found_by_refresh_masters() -> None:
    held, optimizer = train(torch.bfloat16, 1)
    held[0].data[17, 5] = 2.0
    assert optimizer.refresh_masters() == 1
    assert optimizer.state[held[0]]["master"][17, 5] == 2.0


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_state_follows_parameters_whose_objects_are_swapped(when: int, overlap: bool) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = OffloadStreamAdamW(ours, lr=1e-2, overlap_backward=overlap)
    plain = OffloadStreamAdamW(theirs, lr=1e-2)
    for step in range(4):
        if step == when:
            ours = [nn.Parameter(p.detach().clone()) for p in ours]
            optimizer.param_groups[0]["params"] = ours
        for held, each in ((ours, optimizer), (theirs, plain)):
            give(held, step)
            each.step()
    for mine, other in zip(ours, theirs):
        assert_bitwise(mine, other.detach())
        assert int(optimizer.state[mine]["step"]) == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_state_follows_memory_that_is_laid_out_anew(overlap: bool, swap: bool) -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = OffloadStreamAdamW(ours, lr=1e-2, overlap_backward=overlap)
    plain = OffloadStreamAdamW(theirs, lr=1e-2)
    for step in range(4):
        if step == 2:
            for index, parameter in enumerate(ours):
                other_way = parameter.detach().t().contiguous().t() if parameter.ndim == 2 else parameter.detach()
                if index % 2:
                    other_way = parameter.detach().contiguous()
                if swap:
                    optimizer.param_groups[0]["params"][index] = ours[index] = nn.Parameter(other_way.clone())
                else:
                    parameter.data = other_way
        for held, each in ((ours, optimizer), (theirs, plain)):
            give(held, step)
            each.step()
    for mine, other in zip(ours, theirs):
        assert_bitwise(mine, other.detach())
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert_bitwise(optimizer.state[mine][key], plain.state[other][key], key)


def test_a_swap_to_another_shape_after_the_first_step_is_refused() -> None:
    _, optimizer = train(torch.float32, 1)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match="before the optimizer's first step"):
        optimizer.step()


def test_a_parameter_that_left_its_device_is_refused_and_weights_on_meta_have_no_masters() -> None:
    held, optimizer = train(torch.float32, 1)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.empty_like(p, device="meta")) for p in held]
    with pytest.raises(ShapeError, match="move the model before"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = held
    give(held, 1)
    optimizer.step()
    assert_same((held, optimizer), train(torch.float32, 2))
    hollow = OffloadStreamAdamW([nn.Parameter(torch.empty(3, device="meta"))])
    with pytest.raises(ShapeError, match="meta"):
        hollow.materialize()


def test_a_converted_model_goes_on_from_its_masters() -> None:
    held, optimizer = train(torch.float32, 1)
    master = optimizer.state[held[0]]["master"].clone()
    for parameter in held:
        parameter.data = parameter.data.bfloat16()
    optimizer.param_groups[0]["lr"] = 0.0
    give(held, 1)
    optimizer.step()
    assert held[0].dtype == torch.bfloat16
    assert_bitwise(optimizer.state[held[0]]["master"], master, "rounded weights are still their masters rounded")


@pytest.mark.parametrize("write", [_copy, _data_copy, _data])
def test_float32_weights_in_host_memory_are_their_own_masters_wherever_they_go(write: Any) -> None:
    held, optimizer = train(torch.float32, 2)
    fresh = parameters(torch.float32, seed=5)
    for parameter, value in zip(held, fresh):
        write(parameter, value.detach())
    give(held, 2)
    optimizer.step()
    for parameter in held:
        assert_bitwise(optimizer.state[parameter]["master"], parameter.detach())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in held]
    give(held, 3)
    optimizer.step()
    for parameter, value in zip(held, before):
        assert_bitwise(parameter.detach(), value)


def test_a_loader_that_writes_into_the_state_it_read_changes_no_weight() -> None:
    """torch.distributed.checkpoint loads in place, into the tensors of the state dict."""
    held, optimizer = train(torch.float32, 2)
    before = [p.detach().clone() for p in held]
    given = optimizer.state_dict()
    for entry in given["state"].values():
        entry["master"].fill_(7.0)
        entry["exp_avg"].fill_(0.5)
    optimizer.load_state_dict(given)
    optimizer.refresh_masters()
    for parameter, value in zip(held, before):
        assert_bitwise(parameter.detach(), value, "weights win over loaded masters")
        assert_bitwise(optimizer.state[parameter]["master"], value)
        assert bool((optimizer.state[parameter]["exp_avg"] == 0.5).all())


@pytest.mark.parametrize("first", ["cast", "load"])
def test_a_master_comes_beside_weights_that_are_cast(first: str) -> None:
    held, optimizer = train(torch.float32, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = [p.detach().clone() for p in held]
    if first == "load":
        optimizer.load_state_dict(saved)
    for parameter in held:
        parameter.data = parameter.data.bfloat16()
    if first == "cast":
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    give(held, 2)
    optimizer.step()
    for parameter, value in zip(held, kept):
        assert parameter.dtype == torch.bfloat16
        assert_bitwise(optimizer.state[parameter]["master"], value, "the extra bits are kept")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"lr": -1.0}, "lr"), ({"lr": float("nan")}, "lr"), ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, "betas"), ({"betas": (0.9, -0.1)}, "betas"), ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"slots": 0}, "slots"), ({"update": "cloud"}, "update"), ({"max_norm": 0.0}, "max_norm"),
        ({"threads": 0}, "threads"), ({"streams": 0}, "streams"), ({"numa": "always"}, "numa"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OffloadStreamAdamW([nn.Parameter(torch.ones(2))], **bad)


def test_a_scheduler_that_sets_a_negative_rate_is_refused_before_anything_changes() -> None:
    held, optimizer = train(torch.float32, 1)
    before = [p.detach().clone() for p in held]
    optimizer.param_groups[0]["lr"] = -1.0
    give(held, 1)
    with pytest.raises(ConfigError, match="lr"):
        optimizer.step()
    for parameter, old in zip(held, before):
        assert_bitwise(parameter.detach(), old)
    assert int(optimizer.state[held[0]]["step"]) == 1


@pytest.mark.parametrize(
    ("parameter", "told"),
    [
        (torch.ones(2, dtype=torch.complex64), "complex64"), (torch.ones(2, dtype=torch.float64), "float64"),
        (torch.eye(2).to_sparse(), "sparse"), (torch.ones(1).expand(5), "elements share memory"),
    ],
    ids=["complex", "float64", "sparse", "expanded"],
)  # fmt: skip
def test_parameters_that_cannot_be_stepped_exactly_are_refused(parameter: torch.Tensor, told: str) -> None:
    held, optimizer = train(torch.float32, 1)
    with pytest.raises(ShapeError, match=told):
        optimizer.add_param_group({"params": [nn.Parameter(parameter)]})
    assert len(optimizer.param_groups) == 1
    give(held, 1)
    optimizer.step()


def test_a_gradient_that_does_not_fit_is_refused_before_anything_changes() -> None:
    held, optimizer = train(torch.float32, 1)
    twin = train(torch.float32, 1)
    sparse = torch.sparse_coo_tensor([[0], [0]], [1.0], held[0].shape, check_invariants=True)
    shrunk = nn.Parameter(torch.ones(4))
    shrunk.grad = torch.ones(4)
    with torch.no_grad():
        shrunk.set_(torch.ones(3))
    for bad, told in ((sparse, "sparse=False"), (shrunk, "shape of a gradient")):
        give(held, 1)
        if bad is sparse:
            held[-1].grad = None
            held[0].grad = bad
            each = optimizer
        else:
            each = OffloadStreamAdamW([bad])
        with pytest.raises(ShapeError, match=told):
            each.step()
    give(held, 1)
    optimizer.step()
    give(twin[0], 1)
    twin[1].step()
    assert_same((held, optimizer), twin)


def test_host_memory_that_is_not_there_is_refused_before_it_is_allocated() -> None:
    held = parameters(torch.float32)
    arena = Arena("optimizer state", cap_bytes=100_000, pin=False)
    optimizer = OffloadStreamAdamW(held, wiring=Wiring(state=arena))
    give(held, 0)
    before = [p.detach().clone() for p in held]
    with pytest.raises(HostMemoryError, match=r"bytes too many"):
        optimizer.step()
    assert arena.reserved_bytes == 0
    for parameter, old in zip(held, before):
        assert_bitwise(parameter.detach(), old)


def test_missing_host_memory_is_named_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steppe.runtime.arena.free_host_bytes", lambda: 1000)
    optimizer = OffloadStreamAdamW([nn.Parameter(torch.ones(1024, dtype=torch.bfloat16))])
    with pytest.raises(HostMemoryError, match=f"{1024 * 12 - 1000:,} bytes more than there are"):
        optimizer.materialize()


def test_two_optimizers_work_side_by_side() -> None:
    first, second = parameters(torch.bfloat16), parameters(torch.bfloat16, seed=1)
    both = [OffloadStreamAdamW(held, lr=1e-2, overlap_backward=i == 1) for i, held in enumerate((first, second))]
    for step in range(3):
        for held, optimizer in zip((first, second), both):
            give(held, step)
            optimizer.step()
    assert_same((first, both[0]), train(torch.bfloat16, 3))


def test_the_model_may_be_copied_while_the_optimizer_lives() -> None:
    model = nn.Linear(4, 4)
    optimizer = OffloadStreamAdamW(model.parameters(), overlap_backward=True)
    optimizer.materialize()
    copy.deepcopy(model)(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.stats()["num_elements"] == 20
