"""Labels that say to which owner the memory born right now belongs.

A label is a name on a stack of the running thread: `label` for a stretch of code, `region` for a function whose
backward shall be charged too, `fresh` for a recompute that happens to start inside somebody else's label. Without a
Meter nobody reads the stack and the cost is a list append.

Note [Labels of a backward]
A `with` block around a forward says nothing about the tensors which its backward makes. `region` therefore hooks the
graph: the node of an output, which is the first of the region's to run backward, opens the label; the node of a view
taken of each input closes it. The engine runs the youngest node that is ready, so when the first of these views has its
turn, everything made after it is done. Views and not Functions of our own: in-place operators on inputs and results
work as before, and no gradient lives longer. A backward that fails in between never reaches the closing node; what it
left is dropped as soon as the stack is looked at outside of any backward, so a failure can't colour what comes after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    Peak: unchanged.
    Exactness: bitwise; gradients that were None stay None.
    """

    @wraps(fn)
    def charged(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with label(name):
            if not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            span = _Span(name)
            args, kwargs = _from_views(span, (args, kwargs))
            out = fn(*args, **kwargs)
            _open_at(span, out)
            return out

    return charged


class _Span:
    """One call of a region: what its backward opened, so that closing finds it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened: _Frame | None = None

    def open(self, *_: Any) -> None:
        if not any(frame is self.opened for frame in _frames()):
            self.opened = _Frame(self.name, _current_backward())
            _thread.frames.append(self.opened)

    def close(self, *_: Any) -> None:
        frames = _thread.frames
        for depth in reversed(range(len(frames))):
            if frames[depth] is self.opened:
                del frames[depth:]
                break
        self.opened = None


def _from_views(span: _Span, tree: Any) -> Any:
    """`tree` with every tensor that takes part in the backward replaced by a view whose node closes the span."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: _closing_view(span, tensor), tree)


def _closing_view(span: _Span, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
        return tensor
    view = tensor.view_as(tensor)
    assert view.grad_fn is not None
    view.grad_fn.register_hook(span.close)
    return view


def _open_at(span: _Span, tree: Any) -> None:
    """Let the nodes of a region's results open the span, whichever is first."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(span.open)
