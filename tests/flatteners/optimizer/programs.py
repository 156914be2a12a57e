"""Parameters, gradients and programs that the optimizer's tests run side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.engine import Wiring
from steppe.flatteners.optimizer.pipeline import Lines
from steppe.runtime.arena import Arena
from steppe.runtime.lanes import open_lane
from tests.support.exactness import assert_bitwise

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((130, 70), (5,), (), (0, 3), (67,), (4097,))


def parameters(
    dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Plain ones of every shape, a transposed one, and one with gaps in its memory."""
    random_numbers = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_numbers).to(dtype)

    tensors = [*(make(*shape) for shape in shapes), make(40, 50).t(), make(40, 50)[:, ::2]]
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def gradients(like: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    random_numbers = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=random_numbers).to(p.dtype) for p in like]


def delayed_lines(seed: int, *, longest_s: float = 1e-3) -> Callable[[torch.device], Lines]:
    """Real lanes to a device that is the CPU, which sleep before every job."""
    numbers = random.Random(seed)

    def delay() -> float:
        return numbers.random() * longest_s

    def open_lines(_: torch.device) -> Lines:
        names = ("gradients", "parameters", "adamw 0")
        down, up, work = (open_lane(name, CPU, delay=delay, timeout_s=20.0) for name in names)
        return Lines(down, up, (work,))

    return open_lines


def hazardous(seed: int = 0) -> Wiring:
    """Delayed lanes, and NaN in every slot that is not in use."""
    return Wiring(open_lines=delayed_lines(seed), rings=Arena("rings", pin=False, poison=True), poison=True)


def train(
    dtype: torch.dtype, steps: int = 3, *, lr: float = 1e-2, shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[list[torch.nn.Parameter], OffloadStreamAdamW]:
    """Some steps on fixed gradients."""
    held = parameters(dtype, shapes)
    optimizer = OffloadStreamAdamW(held, lr=lr, **settings)
    for step in range(steps):
        give(held, step)
        optimizer.step()
        optimizer.zero_grad()
    return held, optimizer


def give(held: Sequence[torch.Tensor], step: int) -> None:
    for parameter, gradient in zip(held, gradients(held, step)):
        parameter.grad = gradient


def expected(
    held: Sequence[torch.Tensor], steps: int, adam: reference.Adam, kind: type = np.float32
) -> list[reference.State]:
    """The whole-tensor numpy program on the same gradients."""
    states = [reference.state_of(p, kind) for p in held]
    for step in range(steps):
        for state, gradient in zip(states, gradients(held, step)):
            reference.step(state, gradient, adam)
    return states


def assert_same(
    ours: tuple[Sequence[torch.Tensor], OffloadStreamAdamW], theirs: tuple[Sequence[torch.Tensor], OffloadStreamAdamW]
) -> None:
    """Parameters, masters and moments have the same bits."""
    for index, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert_bitwise(mine, other, f"parameter {index}")
        for key in ("step", "master", "exp_avg", "exp_avg_sq"):
            assert_bitwise(ours[1].state[mine][key], theirs[1].state[other][key], f"{key} of parameter {index}")
