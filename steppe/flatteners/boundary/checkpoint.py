"""The deed: torch's own checkpoint recomputes a block, and saved-tensor hooks outside it move the block's input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import nn

from steppe.core.errors import ConfigError
from steppe.flatteners.boundary.budget import BoundaryPolicy
from steppe.flatteners.boundary.crossing import Chain, Crossing
from steppe.flatteners.boundary.handles import Handle, Moved, Remade, Stay, reason_to_stay
from steppe.flatteners.boundary.parcels import Counts, Transit
from steppe.flatteners.boundary.pins import Recorder, Replayer, Timings, Wanted, long_lived
from steppe.flatteners.boundary.replay import Replay, Surroundings, tensors_of, unshard
from steppe.runtime import scopes

__all__ = ["Checkpointer", "long_lived"]


class Checkpointer:
    """Runs blocks under torch's checkpoint with their boundaries in transit.

    Peak: two boundaries on the device, whatever the number of blocks; the others on the host.
    Exactness: bitwise the gradients of `reference.checkpointed`.
    """

    def __init__(self, policy: BoundaryPolicy, device: torch.device, transit: Transit, counts: Counts) -> None:
        self.policy, self.device, self.counts = policy, device, counts
        self.chain = Chain(transit)
        self.wanted = Wanted(
            policy.pin_topk, frozenset(map(_without_overload, policy.operators)), frozenset(),
            frozenset(policy.labels), policy.extra_limit,
        )  # fmt: skip
        self.timings: Timings | None = None

    def run(self, index: int | None, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)`, recomputed in backward. `index` is the boundary's place, where it is known."""
        call, tensors = to_positional(fn, args, kwargs)
        crossing = Crossing(self.chain, index, self._choice(index))
        packing = _Packing(self, crossing, held_storages(fn, args))
        entered = False

        def block(*inputs: torch.Tensor) -> Any:
            nonlocal entered
            if not entered:  # the first forward: all inputs are packed, the block's own work begins
                entered = True
                packing.finish()
                self.chain.advance(crossing)
            return call(*inputs)

        recorder = Recorder(self.wanted, crossing_carrier(self, crossing), self.counts) if self.wanted else None
        surroundings = Surroundings(self.device, tensors) if self._is_replayed(index) else None
        with torch.autograd.graph.saved_tensors_hooks(packing.pack, _unpack):
            out = torch.utils.checkpoint.checkpoint(
                block, *tensors, use_reentrant=False, context_fn=partial(self._contexts, recorder)
            )
        self.chain.offer = None
        handles, packing.handles = packing.handles, []
        if surroundings is not None:
            inputs = list(zip(handles, [t.requires_grad for t in tensors], strict=True))
            gather = partial(_run_gathered, call, modules_of(fn, args))
            again = partial(self._replay_context, recorder)
            self.chain.offer = Replay(gather, crossing, inputs, surroundings, again, tensors_of(out))
        return out

    def _contexts(self, recorder: Recorder | None) -> tuple[Any, Any]:
        return recorder or contextlib.nullcontext(), _Recompute(partial(self._replay_context, recorder))

    def _replay_context(self, recorder: Recorder | None) -> contextlib.AbstractContextManager[object]:
        if recorder is None:
            return contextlib.nullcontext()
        return Replayer(recorder.records, self.wanted, self.counts, self.timings)

    def _choice(self, index: int | None) -> Any:
        return self.policy.default if index is None else self.policy.choice(index)

    def _is_replayed(self, index: int | None) -> bool:
        return self._choice(None if index is None else index + 1) == "recompute"


class _Recompute:
    """The recompute half of `context_fn`: no label of whoever triggered it, and what the forward left. Entered once a
    recompute, so a retained graph may come again."""

    def __init__(self, replayer: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._replayer = replayer

    def __enter__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(scopes.fresh())
        self._stack.enter_context(self._replayer())

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)


# torch before 2.13 saves the inputs through a Function, behind an empty tensor of its own that comes first.
_DUMMY_FIRST: Final = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")


class _Packing:
    """The pack hook of one crossing."""

    def __init__(self, owner: Checkpointer, crossing: Crossing, held: Callable[[], frozenset[int]]) -> None:
        self._owner, self._crossing = owner, crossing
        self._held: Callable[[], frozenset[int]] | None = held
        self._remade = False
        self._dummy_comes = _DUMMY_FIRST
        self.handles: list[Handle] = []

    def pack(self, tensor: torch.Tensor) -> Handle:
        if self._dummy_comes:
            self._dummy_comes = False
            return Stay(tensor)
        handle = self._handle(tensor)
        self.handles.append(handle)
        return handle

    def _handle(self, tensor: torch.Tensor) -> Handle:
        crossing, owner = self._crossing, self._owner
        reason = reason_to_stay(tensor, owner.device, owner.policy.min_bytes) or self._owned(tensor)
        if crossing.choice == "recompute" and (replay := owner.chain.offer) is not None:
            place = replay.place_of(tensor)
            if place is not None:
                self._remade = True
                crossing.source = replay.crossing
                return Remade(tensor, crossing, replay, place)
            reason = reason or "not made by the previous block"
        if reason:
            owner.counts.left_alone[reason] += 1
            return Stay(tensor, crossing)
        return Moved(tensor, crossing, stays=crossing.choice != "offload")

    def finish(self) -> None:
        """Count the crossing. Raises ConfigError when a boundary shall be recomputed and nobody makes it."""
        self._held = None  # it knows the arguments, and this object lives as long as the block's graph
        counts, choice = self._owner.counts, self._crossing.choice
        counts.boundaries += 1
        counts.offloaded += choice == "offload"
        counts.kept += choice == "keep"
        counts.recomputed += choice == "recompute"
        if choice == "recompute" and not self._remade:
            index = self._crossing.index
            raise ConfigError(
                "a boundary without a number" if index is None else f"boundary {index}",
                got="recompute, but its input is no output of the previous block", allowed="offload or keep here",
                remedy="number it with sco.at(index), the first one 0" if index is None else "change its choice",
            )  # fmt: skip

    def _owned(self, tensor: torch.Tensor) -> str:
        """Parameters and buffers under another name: leaves whose storage a module of the block holds."""
        root = tensor if tensor._base is None else tensor._base
        if root.grad_fn is not None:
            return ""  # computed, so nobody's parameter or buffer
        assert self._held is not None
        return "parameter or buffer" if tensor.untyped_storage()._cdata in self._held() else ""


def crossing_carrier(owner: Checkpointer, crossing: Crossing) -> Callable[[torch.Tensor], Handle]:
    """How an extra tensor of a block joins its crossing."""

    def carry(tensor: torch.Tensor) -> Handle:
        if reason_to_stay(tensor, owner.device, owner.policy.min_bytes):
            return Stay(tensor)
        return Moved(tensor, crossing, stays=False)

    return carry


def _unpack(handle: Handle) -> torch.Tensor:
    return handle.tensor()


def to_positional(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """`fn` as a function of the tensors that saved-tensor hooks shall see, and these tensors.

    They are all positional ones, and those given by keyword (of `partial` too) or inside tuples, lists and
    dictionaries that require gradients: hidden states, not masks or tables.
    """
    while isinstance(fn, partial):
        fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
    tensors: list[torch.Tensor] = []
    places = [_lift(arg, tensors, top=True) for arg in args]
    named = _lift(kwargs, tensors)

    def call(*inputs: torch.Tensor) -> Any:
        return fn(*(_fill(place, inputs) for place in places), **_fill(named, inputs))

    return call, tensors


def _lift(node: Any, tensors: list[torch.Tensor], *, top: bool = False) -> Any:
    """`node` with its lifted tensors replaced by slots. (No closure: it would hold the tensors in a cycle.)"""
    if isinstance(node, torch.Tensor):
        if not top and (not node.requires_grad or isinstance(node, nn.Parameter)):
            return node
        tensors.append(node)
        return _Slot(len(tensors) - 1)
    if type(node) in (tuple, list):
        return type(node)(_lift(part, tensors) for part in node)
    return {key: _lift(part, tensors) for key, part in node.items()} if type(node) is dict else node


class _Slot(int):
    """The place of a lifted tensor."""


def _fill(node: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(node, _Slot):
        return inputs[node]
    if type(node) in (tuple, list):
        return type(node)(_fill(part, inputs) for part in node)
    return {key: _fill(part, inputs) for key, part in node.items()} if type(node) is dict else node


def modules_of(fn: Any, args: Sequence[Any] = ()) -> list[nn.Module]:
    """The modules that a function is bound to, closes over or is given."""
    while isinstance(fn, partial):
        fn, args = fn.func, (*fn.args, *args)
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if cell.cell_contents is not cell]
    return [part for part in (fn, getattr(fn, "__self__", None), *cells, *args) if isinstance(part, nn.Module)]


def held_storages(fn: Any, args: Sequence[Any]) -> Callable[[], frozenset[int]]:
    """Storages of the parameters and buffers that a block's modules hold, and of parameters among its arguments."""

    def look() -> frozenset[int]:
        modules = modules_of(fn, args)
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        tensors += [t for t in tensors_of(args) if isinstance(t, nn.Parameter)]
        return frozenset(t.untyped_storage()._cdata for t in tensors if type(t) in (torch.Tensor, nn.Parameter))

    return look


def _run_gathered(call: Callable[..., Any], modules: Sequence[nn.Module], *inputs: torch.Tensor) -> Any:
    unshard(modules)
    return call(*inputs)


def _without_overload(name: str) -> str:
    """`aten.topk.default` and `aten.topk` name the same operator."""
    parts = name.split(".")
    return ".".join(parts[:2])
