"""Sums of weight gradients over chunks: in place, in float32, each rounded once when its expert's rows end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from steppe.flatteners.dispatch.weights import ExpertForm, ExpertStack


@dataclass(frozen=True)
class OneExpert:
    """Views of one expert's gradient tensors."""

    form: ExpertForm
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def one_expert(stack: ExpertStack, place: int) -> OneExpert:
    """The `place`-th expert of a stack."""
    first, second = (None if bias is None else bias[place] for bias in (stack.gate_up_bias, stack.down_bias))
    return OneExpert(stack.form, stack.gate_up[place], stack.down[place], first, second)


class GradientSums(Protocol):
    """Where a chunk adds its experts' gradients."""

    def target(self, place: int) -> OneExpert: ...

    def added(self, place: int) -> None:
        """One chunk of this expert has been added."""


@dataclass
class SlotSums:
    """Foreign experts: sums in the slots of a set, which travel home as they are."""

    slots: ExpertStack

    def target(self, place: int) -> OneExpert:
        return one_expert(self.slots, place)

    def added(self, place: int) -> None:
        return None

    def clear(self) -> None:
        """Before the set's next group."""
        for tensor in self.slots.tensors:
            tensor.zero_()


@dataclass
class NativeSums:
    """Gradients of the natives. Where they are narrower than their sums, an expert in flight holds a float32 sum.

    `left` counts what is still to come for each expert: chunks of its own rows, and gradients from helpers. At zero the
    sum is rounded into `grads` and its buffer serves the next expert. Experts without rows keep zero gradients.
    """

    grads: ExpertStack
    left: list[int]
    dtype: torch.dtype  # of sums
    held: dict[int, ExpertStack] = field(default_factory=dict)
    free: list[ExpertStack] = field(default_factory=list)
    most_held: int = 0

    @classmethod
    def zeros(cls, form: ExpertForm, left: list[int], like: torch.Tensor, dtype: torch.dtype) -> NativeSums:
        """Zero gradients in the dtype of `like`."""
        grads = form.stack(*(like.new_zeros(shape) for shape in form.shapes(len(left))))
        return cls(grads, left, dtype)

    def target(self, place: int) -> OneExpert:
        if self.grads.gate_up.dtype == self.dtype:
            return one_expert(self.grads, place)
        if place not in self.held:
            buffer = self.free.pop() if self.free else self._new_buffer()
            for tensor in buffer.tensors:
                tensor.zero_()
            self.held[place] = buffer
        return one_expert(self.held[place], 0)

    def added(self, place: int) -> None:
        self.left[place] -= 1
        if self.left[place] == 0 and place in self.held:
            buffer = self.held.pop(place)
            for grad, total in zip(self.grads.of(place), buffer.of(0), strict=True):
                grad.copy_(total)
            self.free.append(buffer)

    def add_from_helper(self, place: int, came: ExpertStack) -> None:
        """Add a gradient that came home, in the order in which helpers are drained."""
        target = self.target(place)
        tensors = (target.gate_up, target.down, target.gate_up_bias, target.down_bias)
        for total, part in zip((t for t in tensors if t is not None), came.of(0), strict=True):
            total.add_(part)
        self.added(place)

    def _new_buffer(self) -> ExpertStack:
        self.most_held = max(self.most_held, len(self.held) + 1)
        return self.grads.form.empty(1, like=self.grads.gate_up, dtype=self.dtype)


def row_tiles(start: int, stop: int, width: int, tile_elements: int) -> Iterator[slice]:
    """Slices of [start, stop) of at most `tile_elements` elements at `width` columns."""
    step = max(1, tile_elements // width)
    for a in range(start, stop, step):
        yield slice(a, min(stop, a + step))


def accumulate(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, transposed: bool, tile_elements: int
) -> None:
    """total += left^T @ right ([in,out]; [out,in] unless `transposed`), products summed in total's dtype."""
    if not transposed:
        left, right = right, left
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif total.device.type == "cuda":
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:  # the CPU's product has no wider output: tiles are widened first
        width = max(left.shape[1], right.shape[1])
        for tile in row_tiles(0, len(left), width, tile_elements):
            total.addmm_(left[tile].to(total.dtype).t(), right[tile].to(total.dtype))
