"""Parameters that hold the same memory are refused; views of one storage that don't meet train as copies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.errors import ShapeError
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from tests.support.exactness import assert_bitwise

from .programs import give

Cut = Callable[[torch.Tensor], list[torch.Tensor]]


def _held(cut: Cut, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [nn.Parameter(view) for view in cut(whole)]


MEET: dict[str, Cut] = {
    "the whole twice": lambda x: [x, x],
    "rows 0 to 3 and 2 to 5": lambda x: [x[:4], x[2:]],
    "one inside of another, one beside": lambda x: [x[:4], x[4:], x[1:2]],
    "every other column, and a row": lambda x: [x[:, ::2], x[1]],
    "strides 2 and 3": lambda x: [x.view(-1)[::2], x.view(-1)[1::3]],
    "a transposed view": lambda x: [x, x.t()],
    "two dtypes": lambda x: [x, x.view(torch.bfloat16)[:1]],
}
APART: dict[str, Cut] = {
    "rows": lambda x: [x[4:], x[:2], x[2:4]],
    "every other row": lambda x: [x[::2], x[1::2]],
    "columns": lambda x: [x[:, i] for i in range(8)],
    "blocks of columns": lambda x: [x[:, :3], x[:, 3:]],
    "strides 2 and 4": lambda x: [x.view(-1)[::2], x.view(-1)[1::4]],
    "nothing": lambda x: [x, x[:0], x[3:3]],
    "halves of two dtypes": lambda x: [x[:3], x[3:].view(torch.bfloat16)],
}


@pytest.mark.parametrize("kind", MEET)
def test_two_parameters_that_share_memory_are_refused_before_anything_changes(kind: str) -> None:
    held = _held(MEET[kind])
    before = [p.detach().clone() for p in held]
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    give(held, 0)
    for enter in (optimizer.step, optimizer.materialize, lambda: optimizer.state):
        with pytest.raises(ShapeError, match=r"share memory.*one place for each element.*one Parameter object"):
            enter()
    assert optimizer.state_dict()["state"] == {}
    for parameter, value in zip(held, before):
        assert_bitwise(parameter.detach(), value)


@pytest.mark.parametrize("settings", [{}, {"update": "device"}], ids=str)
@pytest.mark.parametrize("kind", APART)
def test_views_of_one_storage_that_do_not_meet_train_as_copies_do(kind: str, settings: dict[str, Any]) -> None:
    held = _held(APART[kind])
    copies = [nn.Parameter(p.detach().clone()) for p in held]
    for each in (held, copies):
        optimizer = OffloadStreamAdamW(each, lr=1e-2, **settings)
        for step in range(2):
            give(each, step)
            optimizer.step()
    for mine, other in zip(held, copies):
        assert_bitwise(mine.detach(), other.detach())


@pytest.mark.parametrize("how", ["data", "swap", "group"])
def test_parameters_that_come_to_share_memory_later_are_refused(how: str) -> None:
    held = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))]
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    give(held, 0)
    optimizer.step()
    kept = held[1].data
    if how == "data":
        held[1].data = held[0].data
    elif how == "swap":
        optimizer.param_groups[0]["params"][1] = nn.Parameter(held[0].data)
    else:
        optimizer.add_param_group({"params": [nn.Parameter(held[1].data)]})
    now = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in now]
    for _ in range(2):
        give(now, 1)
        with pytest.raises(ShapeError, match="share memory"):
            optimizer.step()
    for parameter, value in zip(now, before):
        assert_bitwise(parameter.detach(), value)
    if how == "data":
        held[1].data = kept
        optimizer.step()


def test_a_frozen_view_of_a_trained_parameter_is_no_second_writer() -> None:
    trained = nn.Parameter(torch.ones(4))
    frozen = nn.Parameter(trained.data, requires_grad=False)
    optimizer = OffloadStreamAdamW([trained, frozen], lr=1e-2)
    trained.grad = torch.ones(4)
    optimizer.step()
    assert_bitwise(frozen.detach(), trained.detach())


def test_memory_is_looked_at_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _held(APART["columns"])
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    give(held, 0)
    optimizer.step()

    def again(*_: object) -> None:
        raise AssertionError("nothing moved")

    monkeypatch.setattr("steppe.flatteners.optimizer.memory.check_apart", again)
    optimizer.step()
    held[0].data = held[0].data.clone()
    with pytest.raises(AssertionError, match="nothing moved"):
        optimizer.step()
