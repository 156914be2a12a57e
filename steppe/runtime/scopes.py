"""Labels that say to which owner the memory born right now belongs.

A label is a name on a stack of the running thread: `label` for a stretch of code, `region` for a function whose
backward shall be charged too, `fresh` for a recompute that happens to start inside somebody else's label. Without a
Meter nobody reads the stack and the cost is a list append.

Note [Labels of a backward]
A `with` block around a forward says nothing about the tensors which its backward makes. `region` therefore puts one
identity autograd Function on the outputs, whose backward opens the label, and one on the inputs, whose backward closes
it. A backward that fails in between never reaches the closing one; what it left is dropped as soon as the stack is
looked at outside of any backward, so a failure can't colour what comes after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils import _pytree as pytree

UNLABELLED = "other"

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_BACKWARD = -1
_current_backward: Callable[[], int] = torch._C._current_graph_task_id


class _Frame(NamedTuple):
    name: str
    backward: int  # id of the backward that opened it; _NO_BACKWARD for a `with` block


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_thread = _Thread()


def _frames() -> list[_Frame]:
    """The frames of this thread, without what a failed backward left (Note [Labels of a backward])."""
    frames = _thread.frames
    if frames and frames[-1].backward != _NO_BACKWARD and _current_backward() == _NO_BACKWARD:
        while frames and frames[-1].backward != _NO_BACKWARD:
            frames.pop()
    return frames


def current() -> str:
    """The innermost label of this thread, `"other"` where there is none."""
    frames = _frames()
    return frames[-1].name if frames else UNLABELLED


def in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return _current_backward() != _NO_BACKWARD


class label:  # noqa: N801  (used as a `with` word)
    """`with label("vocab"): ...` charges what is born inside to that owner; leaves by exception are fine."""

    __slots__ = ("_depth", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0

    def __enter__(self) -> None:
        frames = _frames()
        self._depth = len(frames)
        frames.append(_Frame(self._name, _NO_BACKWARD))

    def __exit__(self, *exc: object) -> None:
        del _thread.frames[self._depth :]


def fresh() -> label:
    """A label-free stretch: the recompute half of a checkpoint's `context_fn`, whatever is open where it starts."""
    return label(UNLABELLED)


def region(name: str, fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`fn` with its forward and its backward charged to `name`; arguments and results may be any pytree of tensors.

    Peak: unchanged (nothing is saved; the gradients of the inputs are handed on together, when the last one is there).
    Exactness: bitwise; gradients that were None stay None.
    """

    @wraps(fn)
    def charged(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with label(name):
            if not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            span = _Span(name)
            (args, kwargs) = _through(_Close, span, (args, kwargs))  # type: ignore[assignment]
            return _through(_Open, span, fn(*args, **kwargs))  # type: ignore[no-any-return]

    return charged


class _Span:
    """One call of a region: what its backward opened, so that closing finds it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: _Frame | None = None

    def open(self) -> None:
        self.opened = _Frame(self.name, _current_backward())
        _thread.frames.append(self.opened)

    def close(self) -> None:
        frames = _thread.frames
        for depth in reversed(range(len(frames))):
            if frames[depth] is self.opened:
                del frames[depth:]
                break
        self.opened = None


class _Open(torch.autograd.Function):
    """Identity on a region's outputs; its backward is the first of the region's to run."""

    @staticmethod
    def forward(ctx: Any, span: _Span, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.span = span
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.span.open()
        return None, *grads


class _Close(torch.autograd.Function):
    """Identity on a region's inputs; its backward is the last of the region's to run."""

    @staticmethod
    def forward(ctx: Any, span: _Span, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.span = span
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.span.close()
        return None, *grads


def _through(gate: type[_Open] | type[_Close], span: _Span, tree: Any) -> Any:
    """`tree` with every tensor that takes part in the backward passed through `gate`, all in one node."""
    leaves, spec = pytree.tree_flatten(tree)
    picked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not picked:
        return tree
    passed: Sequence[torch.Tensor] = gate.apply(span, *(leaves[i] for i in picked))
    for i, tensor in zip(picked, passed, strict=True):
        leaves[i] = tensor
    return pytree.tree_unflatten(leaves, spec)
