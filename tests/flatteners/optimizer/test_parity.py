"""One set of bits whatever the schedule, and nearer to the truth than torch's own AdamW."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.engine import Wiring
from steppe.flatteners.optimizer.kernel import NumpyKernel
from tests.support.exactness import assert_bitwise, assert_reordered, relative_error

from .programs import DTYPES, assert_same, delayed_lines, expected, give, gradients, hazardous, parameters, train

ADAM = reference.Adam(lr=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update", ["host", "device"])
def test_the_bits_are_those_of_the_whole_tensor_program(dtype: torch.dtype, update: str) -> None:
    held, optimizer = train(dtype, steps=4, update=update, bucket_bytes=8192)
    for index, (ours, state) in enumerate(zip(held, expected(parameters(dtype), 4, ADAM))):
        assert_bitwise(ours, reference.written(state, ours), f"parameter {index}")
        for key in ("master", "exp_avg", "exp_avg_sq"):
            truth = torch.from_numpy(np.array(getattr(state, key)))
            assert_bitwise(optimizer.state[ours][key], truth, f"{key} of parameter {index}")
        assert int(optimizer.state[ours]["step"]) == state.t


def _grid(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, choice)) for choice in itertools.product(*values.values())]


SCHEDULES = [
    {"bucket_bytes": 4096},  # splits nearly every tensor
    {"bucket_bytes": 7 * 1024, "slots": 1},
    {"slots": 4, "threads": 3},
    {"bucket_bytes": 4096, "wiring": "lanes"},
    {"bucket_bytes": 4096, "slots": 3, "threads": 2, "wiring": "lanes"},
    {"bucket_bytes": 8192, "streams": 2},
    {"bucket_bytes": 4096, "update": "device"},
    {"bucket_bytes": 16384, "update": "device", "slots": 1},
    {"overlap_backward": True},
    {"overlap_backward": True, "bucket_bytes": 4096, "wiring": "lanes"},
    {"overlap_backward": True, "bucket_bytes": 4096, "update": "device"},
    {"wiring": "numpy"},
]
FULL_GRID = _grid(
    {
        "bucket_bytes": [4096, 10_000, 2**20], "slots": [1, 2, 3], "threads": [1, 2, 5], "update": ["host", "device"],
        "overlap_backward": [False, True], "wiring": [None, "lanes"],
    }
)  # fmt: skip


def _wired(schedule: dict[str, Any]) -> dict[str, Any]:
    wirings = {"lanes": Wiring(open_lines=delayed_lines(7)), "numpy": Wiring(kernel=NumpyKernel("asked for"))}
    return {**schedule, "wiring": wirings.get(schedule.get("wiring"))}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_schedule_changes_a_bit(dtype: torch.dtype, schedule: dict[str, Any]) -> None:
    assert_same(train(dtype, **_wired(schedule)), train(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FULL_GRID, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_schedule_of_the_full_grid_changes_a_bit(dtype: torch.dtype, schedule: dict[str, Any]) -> None:
    settings = _wired(schedule) | {"max_norm": 1.0}
    assert_same(train(dtype, **settings), train(dtype, max_norm=1.0))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_clipping_by_the_global_norm_depends_on_no_schedule(schedule: dict[str, Any]) -> None:
    ours = train(torch.bfloat16, max_norm=0.5, **_wired(schedule))
    theirs = train(torch.bfloat16, max_norm=0.5)
    assert ours[1].grad_norm == theirs[1].grad_norm
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 10, pytest.param(200, marks=pytest.mark.slow)])
def test_the_error_against_float64_is_no_larger_than_torchs_in_float32(dtype: torch.dtype, steps: int) -> None:
    _judge(dtype, steps, ((130, 70), (4097,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_200_steps_the_error_is_still_no_larger(dtype: torch.dtype) -> None:
    _judge(dtype, 200, ((40, 30),))


def _judge(dtype: torch.dtype, steps: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    held, optimizer = train(dtype, steps, shapes=shapes)
    plain = reference.SerialOffload(parameters(dtype, shapes), lr=1e-2, foreach=False)
    truth = expected(parameters(dtype, shapes), steps, ADAM, np.float64)
    for step in range(steps):
        give(plain.parameters, step)
        plain.step()
    pairs = [("master", [m.data for m in plain.masters])]
    pairs += [(key, [plain.adamw.state[m][key] for m in plain.masters]) for key in ("exp_avg", "exp_avg_sq")]
    for key, theirs in pairs:
        exact = [torch.from_numpy(np.array(getattr(state, key))) for state in truth]
        for index, (ours, other, true) in enumerate(zip(held, theirs, exact)):
            what = f"{key} of parameter {index} after {steps} steps"
            assert_reordered(optimizer.state[ours][key], other, true, length=1, what=what)
        both = [torch.cat([t.detach().flatten().double() for t in tensors]) for tensors in
                ([optimizer.state[p][key] for p in held], theirs, exact)]  # fmt: skip
        if key == "master":
            assert relative_error(both[0], both[2]) <= relative_error(both[1], both[2]), f"master after {steps} steps"


def test_a_parameter_without_a_gradient_takes_no_step() -> None:
    held = parameters(torch.float32)
    optimizer = OffloadStreamAdamW(held, lr=1e-2)
    give(held, 0)
    held[0].grad = None
    before = held[0].detach().clone()
    optimizer.step()
    assert_bitwise(held[0], before)
    assert int(optimizer.state[held[0]]["step"]) == 0
    assert int(optimizer.state[held[1]]["step"]) == 1
    give(held, 1)
    optimizer.step()
    state = reference.state_of(before, np.float32)
    reference.step(state, held[0].grad, ADAM)
    assert_bitwise(held[0], reference.written(state, held[0]), "its first step has the first step's bias correction")


class _Case:
    """A drawn model and history: shapes, groups, gradients that are missing, learning rates that change."""

    def __init__(self, data: st.DataObject) -> None:
        shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
        self.shapes = data.draw(st.lists(shape, min_size=1, max_size=6), "shapes")
        self.dtype = data.draw(st.sampled_from(DTYPES), "dtype")
        self.border = data.draw(st.integers(0, len(self.shapes)), "second group from")
        steps = st.fixed_dictionaries(
            {"lr": st.sampled_from([0.0, 1e-4, 0.1]), "missing": st.sets(st.integers(0, len(self.shapes) - 1))}
        )
        self.steps = data.draw(st.lists(steps, min_size=1, max_size=4), "steps")
        self.settings = data.draw(
            st.fixed_dictionaries(
                {
                    "bucket_bytes": st.sampled_from([4096, 2**20]), "slots": st.integers(1, 3),
                    "threads": st.integers(1, 3), "update": st.sampled_from(["host", "device"]),
                    "overlap_backward": st.booleans(), "maximize": st.booleans(),
                }
            ),
            "settings",
        )  # fmt: skip


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_model_and_history_has_the_whole_tensor_programs_bits(data: st.DataObject) -> None:
    case = _Case(data)
    held = parameters(case.dtype, case.shapes)[: len(case.shapes)]
    groups = [{"params": held[: case.border], "weight_decay": 0.0}, {"params": held[case.border :]}]
    optimizer = OffloadStreamAdamW([g for g in groups if g["params"]], weight_decay=0.1, **case.settings)
    states = [reference.state_of(p, np.float32) for p in held]
    for number, drawn in enumerate(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = drawn["lr"]
        for index, gradient in enumerate(gradients(held, number)):
            held[index].grad = None if index in drawn["missing"] else gradient
            if index not in drawn["missing"]:
                decay = 0.0 if index < case.border else 0.1
                adam = reference.Adam(lr=drawn["lr"], weight_decay=decay, maximize=case.settings["maximize"])
                reference.step(states[index], gradient, adam)
        optimizer.step()
        optimizer.zero_grad()
    for index, (parameter, state) in enumerate(zip(held, states)):
        assert_bitwise(parameter, reference.written(state, parameter), f"parameter {index}")
    optimizer.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{}, {"update": "device"}, {"overlap_backward": True}, {"slots": 1}], ids=str)
def test_delays_and_poisoned_slots_change_no_bit(settings: dict[str, Any], seed: int) -> None:
    ours = train(torch.bfloat16, bucket_bytes=4096, wiring=hazardous(seed), max_norm=1.0, **settings)
    assert_same(ours, train(torch.bfloat16, max_norm=1.0))
