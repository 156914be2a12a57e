"""What a recompute takes from the first forward instead of computing it: top-k choices and kept results.

Two dispatch modes, one for the forward and one for each recompute. They count the calls of every operator, so the n-th
call of the recompute finds what the n-th call of the forward left.

Note [Pinned choices]
A router's top-k may break a tie the other way in the recompute; gradients then go to other experts, silently. Only the
indices are pinned, as int32 of our own: the values are gathered from the recomputed scores, which gives the same bits
and does not care that models divide the values in place.
"""

from __future__ import annotations

import contextvars
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from steppe.core.errors import ConfigError
from steppe.flatteners.boundary.handles import Handle, alias
from steppe.flatteners.boundary.parcels import Counts

_TOPK = torch.ops.aten.topk.default
_UNCOUNTED = {torch.ops.aten.detach.default}  # their number differs between forward and recompute
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "_dtensor")
Call = tuple[str, int]  # operator, how many calls of it came before
_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


@dataclass(frozen=True)
class Wanted:
    """What the recorder looks for."""

    topk: bool = True
    operators: frozenset[str] = frozenset()  # without overload: every call of it
    calls: frozenset[Call] = frozenset()  # what `auto` chose
    labels: frozenset[str] = frozenset()
    limit: int = 3

    def __bool__(self) -> bool:
        return bool(self.topk or self.operators or self.calls or self.labels)


@dataclass
class Kept:
    """All outputs of one call, tensors as handles, and the random state behind it where the call moved it."""

    outputs: list[tuple[Handle | None, Any]]
    is_sequence: bool
    random_after: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def take(self) -> Any:
        for kind, state in self.random_after:
            _random_of(kind).set_rng_state(state)
        # A fresh alias each time: autograd writes its graph onto what an operator returns.
        outputs = [value if handle is None else alias(handle.tensor()) for handle, value in self.outputs]
        return tuple(outputs) if self.is_sequence else outputs[0]


class Records:
    """What one forward of one block leaves for its recomputes."""

    def __init__(self) -> None:
        self.choices: list[Handle] = []
        self.kept: dict[Call, Kept] = {}


class Recorder(TorchDispatchMode):
    """The forward's mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # an active mode that does not say so turns torch.compile off, silently

    def __init__(self, wanted: Wanted, carry: Callable[[torch.Tensor], Handle], counts: Counts) -> None:
        super().__init__()
        self.records = Records()
        self._wanted, self._carry, self._counts = wanted, carry, counts
        self._calls: Counter[Any] = Counter()
        self._origins: dict[int, _Origin] = {}

    def __enter__(self) -> Recorder:
        self._token = _recorder.set(self)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        _recorder.reset(self._token)
        self._origins.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _TOPK and self._wanted.topk:
            out = func(*args, **kwargs)
            self.records.choices.append(self._carry(out[1].to(torch.int32)))
            self._counts.topk_pinned += 1
            return out
        wanted = self._wanted
        if not (wanted.operators or wanted.calls or wanted.labels) or func in _UNCOUNTED:
            return func(*args, **kwargs)
        call = (operator_name(func), self._calls[func])
        self._calls[func] += 1
        if call[0] in wanted.operators or call in wanted.calls:
            return self._keep(call, func, args, kwargs)
        out = func(*args, **kwargs)
        if wanted.labels and isinstance(out, torch.Tensor) and makes_new(func):
            self._origins[out.untyped_storage()._cdata] = _Origin(out, call)
        return out

    def mark(self, tensor: torch.Tensor, label: str) -> None:
        """Keep the result of the operator that made `tensor`."""
        origin = self._origins.get(tensor.untyped_storage()._cdata)
        if label not in self._wanted.labels or origin is None or origin.storage.expired():
            self._counts.marks_ignored += 1
            return
        self._counts.seen_extras.add(label)
        if tensor._version != origin.version:
            raise ConfigError(
                f"long-lived tensor {label!r}", got="a tensor changed in place since an operator made it",
                allowed="an operator's result as it is", remedy="mark it right behind the operator",
            )  # fmt: skip
        if origin.call not in self.records.kept and self._has_room():
            whole = alias(tensor).as_strided(*origin.geometry)
            self.records.kept[origin.call] = Kept([(self._carry(whole), None)], is_sequence=False)

    def _keep(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if not makes_new(func):
            raise ConfigError(
                "offload_extra", got=f"{call[0]}, which returns or changes its input",
                allowed="operators whose results are new tensors", remedy="name the operator that computes it",
            )  # fmt: skip
        self._counts.seen_extras.add(call[0])
        if not self._has_room():
            return func(*args, **kwargs)
        before = _random_states(func, args)
        out = func(*args, **kwargs)
        parts = list(out) if isinstance(out, (tuple, list)) else [out]
        outputs = [(self._carry(p), None) if isinstance(p, torch.Tensor) else (None, p) for p in parts]
        moved = [(kind, after) for (kind, was), (_, after) in zip(before, _random_states(func, args), strict=True)
                 if not torch.equal(was, after)]  # fmt: skip
        self.records.kept[call] = Kept(outputs, isinstance(out, (tuple, list)), moved)
        return out

    def _has_room(self) -> bool:
        room = len(self.records.kept) < self._wanted.limit
        self._counts.extras_kept += room
        self._counts.extras_short_lived += not room
        return room


class Replayer(TorchDispatchMode):
    """The recompute's mode. With `timings`, the time of every operator that runs is noted there."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, records: Records, wanted: Wanted, counts: Counts, timings: Timings | None = None) -> None:
        super().__init__()
        self._records, self._wanted, self._counts, self._timings = records, wanted, counts, timings
        self._calls: Counter[Any] = Counter()
        self._choices = 0

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._timings is not None:
            self._timings.recomputes += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _TOPK and self._wanted.topk:
            return self._choose(args, kwargs)
        if func in _UNCOUNTED or not (self._records.kept or self._timings is not None):
            return func(*args, **kwargs)
        call = (operator_name(func), self._calls[func])
        self._calls[func] += 1
        kept = self._records.kept.get(call)
        if kept is not None:
            return kept.take()
        if self._timings is not None and makes_new(func):
            return self._timings.run(call, func, args, kwargs)
        return func(*args, **kwargs)

    def _choose(self, args: Any, kwargs: Any) -> Any:
        if self._choices >= len(self._records.choices):
            raise RuntimeError("the recompute calls top-k more often than the forward did")
        indices = self._records.choices[self._choices].tensor().to(torch.int64)
        self._choices += 1
        self._counts.topk_replayed += 1
        scores = args[0]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return scores.gather(dim, indices), indices


class Timings:
    """Time and bytes of the operators of a recompute, by call: the lower of what was measured."""

    def __init__(self) -> None:
        self.recomputes = 0
        self.measured: dict[Call, tuple[int, int]] = {}  # nanoseconds, bytes

    def run(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        _synchronize()
        started = time.perf_counter_ns()
        out = func(*args, **kwargs)
        _synchronize()
        taken = time.perf_counter_ns() - started
        parts = out if isinstance(out, (tuple, list)) else (out,)
        size = sum(p.numel() * p.element_size() for p in parts if isinstance(p, torch.Tensor))
        self.measured[call] = min(taken, self.measured.get(call, (taken, 0))[0]), size
        return out


class _Origin:
    """Which call made a storage; the weak reference keeps its identity from being given to another."""

    __slots__ = ("call", "geometry", "storage", "version")

    def __init__(self, out: torch.Tensor, call: Call) -> None:
        self.call, self.storage, self.version = call, StorageWeakRef(out.untyped_storage()), alias(out)._version
        self.geometry = out.size(), out.stride(), out.storage_offset()


def long_lived(tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Mark a tensor inside a checkpointed block: keep it on the host instead of recomputing it.

    What is kept is the result of the operator that made the tensor; `label` must stand in `offload_extra`. Outside of
    SCO, in a recompute and without gradients it is the identity.
    Exactness: bitwise. Raises: ConfigError when the tensor was changed in place since.
    """
    recorder = _recorder.get()
    if recorder is not None:
        recorder.mark(tensor, label)
    return tensor


def operator_name(func: Any) -> str:
    """`aten.mm`: namespace and operator, without the overload."""
    return str(func).rsplit(".", 1)[0] if isinstance(func, torch._ops.OpOverload) else str(func)


def makes_new(func: Any) -> bool:
    """Whether an operator's outputs are new tensors: it neither changes nor returns its inputs, nor communicates."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace in _COLLECTIVES:
        return False
    return not schema.is_mutable and all(out.alias_info is None for out in schema.returns)


def _random_of(kind: str) -> Any:
    return torch.random if kind == "cpu" else torch.get_device_module(kind)


def _random_states(func: Any, args: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """The random states that a call may move; they must move in the recompute, which skips the call, too."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    kinds = sorted({"cpu", *(arg.device.type for arg in args if isinstance(arg, torch.Tensor))})
    return [(kind, _random_of(kind).get_rng_state()) for kind in kinds]


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
