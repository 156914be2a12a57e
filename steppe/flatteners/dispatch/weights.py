"""Stacked expert weights and their variants, described by a value.

`first(e)` [H,2I] and `second(e)` [I,H] are views that multiply rows from the right, whatever the storage order is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from steppe.core.errors import ShapeError
from steppe.flatteners.dispatch.gates import Activation, Gate, gate_of

TENSOR_NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class ExpertForm:
    """How expert tensors are to be read: everything of an `ExpertWeights` but the tensors."""

    hidden: int  # H
    width: int  # I
    has_gate_up_bias: bool
    has_down_bias: bool
    transposed: bool
    interleaved: bool
    gate: Gate

    def shapes(self, num_experts: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of `num_experts` experts, in the order of `ExpertWeights.tensors`."""
        first, second = (2 * self.width, self.hidden), (self.hidden, self.width)
        if self.transposed:
            first, second = first[::-1], second[::-1]
        shapes: list[tuple[int, ...]] = [(num_experts, *first), (num_experts, *second)]
        if self.has_gate_up_bias:
            shapes.append((num_experts, 2 * self.width))
        if self.has_down_bias:
            shapes.append((num_experts, self.hidden))
        return tuple(shapes)

    def elements(self) -> int:
        """Elements of one expert."""
        return sum(torch.Size(shape).numel() for shape in self.shapes(1))

    def stack(self, *tensors: torch.Tensor) -> ExpertStack:
        """The tensors read in this form."""
        rest = list(tensors[2:])
        first = rest.pop(0) if self.has_gate_up_bias else None
        second = rest.pop(0) if self.has_down_bias else None
        return ExpertStack(self, tensors[0], tensors[1], first, second)

    def empty(self, num_experts: int, *, like: torch.Tensor, dtype: torch.dtype) -> ExpertStack:
        """Uninitialised experts on the device of `like`."""
        return self.stack(*(like.new_empty(shape, dtype=dtype) for shape in self.shapes(num_experts)))


@dataclass(frozen=True)
class ExpertStack:
    """Tensors in a form: weights, or gradients of weights."""

    form: ExpertForm
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if t is not None)

    def first(self, expert: int) -> torch.Tensor:
        """[H,2I] view of the first matrix."""
        return self.gate_up[expert] if self.form.transposed else self.gate_up[expert].t()

    def second(self, expert: int) -> torch.Tensor:
        """[I,H] view of the second matrix."""
        return self.down[expert] if self.form.transposed else self.down[expert].t()

    def of(self, expert: int) -> tuple[torch.Tensor, ...]:
        """One expert's tensors, contiguous views."""
        return tuple(t[expert] for t in self.tensors)


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one rank: gate_up [M,2I,H], down [M,H,I], biases [M,2I] and [M,H].

    `transposed`: gate_up [M,H,2I], down [M,I,H]. `interleaved`: gate and up columns alternate. `activation` is a name
    (then the experts compute activation(gate) * up) or a function of (gate, up) in float32, elementwise, whose gradient
    is taken by autograd tile by tile. gpt-oss: transposed, interleaved, biased, `gates.clamped_swiglu(alpha, limit)`.

    Raises: ShapeError where the tensors don't fit each other.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    transposed: bool = False
    interleaved: bool = False
    activation: Activation | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "silu"

    def __post_init__(self) -> None:
        if self.gate_up.dim() != 3 or self.down.dim() != 3:
            got = f"{tuple(self.gate_up.shape)} and {tuple(self.down.shape)}"
            raise ShapeError("expert weights", got=got, allowed="stacked [M, ., .] tensors", remedy="stack the experts")
        shapes = self.form().shapes(self.num_experts)
        for name, tensor, shape in zip(self._present(), self.tensors, shapes, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != self.gate_up.dtype:
                raise ShapeError(
                    f"expert weights, {name}", got=f"{tuple(tensor.shape)} {tensor.dtype}",
                    allowed=f"{shape} {self.gate_up.dtype}", remedy="check transposed=, and cast all to one dtype",
                )  # fmt: skip

    @property
    def num_experts(self) -> int:
        """Experts on this rank, M."""
        return self.gate_up.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for name in TENSOR_NAMES if (t := getattr(self, name)) is not None)

    def form(self) -> ExpertForm:
        """The description without the tensors."""
        hidden, width = self.down.shape[1:] if not self.transposed else self.down.shape[:0:-1]
        return ExpertForm(
            hidden=hidden, width=width,
            has_gate_up_bias=self.gate_up_bias is not None, has_down_bias=self.down_bias is not None,
            transposed=self.transposed, interleaved=self.interleaved, gate=gate_of(self.activation),
        )  # fmt: skip

    def _present(self) -> tuple[str, ...]:
        return tuple(name for name in TENSOR_NAMES if getattr(self, name) is not None)
