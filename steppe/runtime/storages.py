"""Storages followed from birth to death: who is seen by whom, and when the memory goes.

A `Watch` is a dispatch mode that looks at the arguments and results of every operator, finds the storage behind each
tensor, and hears of its death through a weak reference. Storages that shrink and grow in place (FSDP2 frees its
gathered parameters that way) are heard through `torch.UntypedStorage.resize_`, which is not an operator.

What a Watch can't see is a tensor that no operator received or returned: the scratch memory inside one operator.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_host: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
_watches: list[Watch] = []
_entering = threading.Lock()  # profiles on several threads begin and end beside each other
_listeners: list[Callable[[torch.UntypedStorage], object]] = []
_Resize = Callable[[torch.UntypedStorage, int], Any]


def declare_host(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Say that this CPU tensor's memory is the host's (an arena called `name`), also where the device is the CPU."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _host[key] = weakref.ref(storage, lambda _, key=key: _host.pop(key, None)), name
    for watch in _watches:
        watch.declared(storage)
    for listener in _listeners:
        listener(storage)
    return tensor


@contextmanager
def host_declarations(listener: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call `listener` with every storage that is declared the host's meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def host_name(storage: torch.UntypedStorage) -> str | None:
    """The arena that a storage was declared for, None for every other one."""
    found = _host.get(storage._cdata)
    return None if found is None else found[1]


def watches() -> tuple[Watch, ...]:
    """The watches that are entered now, outermost first."""
    return tuple(_watches)


class Held(weakref.ref):  # type: ignore[type-arg]
    """One living storage, as a weak reference that carries what is known of it."""

    __slots__ = ("address", "index", "key", "num_bytes", "owner", "place")

    key: int
    num_bytes: int
    place: str
    owner: str
    index: int
    address: int


class Watch(TorchDispatchMode):
    """Calls `born`, `resized` and `died` for every storage that operators touch while it is entered.

    Watches nest. A death on another thread is taken in at the next operator, with the time at which it happened.
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device_type = device_type or (accelerator.type if accelerator is not None else "cpu")
        self._held: dict[int, Held] = {}
        self._dead: deque[tuple[int, Held]] = deque()
        self.operator_ns = time.time_ns()  # when the last operator began: its results are allocated then

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave torch.compile alone: without this, any dispatch mode turns it off without a word."""
        return True

    def born(self, held: Held, found: bool) -> None:
        """A storage is seen for the first time; `found` when it lived before (it came as an argument)."""

    def resized(self, held: Held, old_bytes: int) -> None:
        """A storage changed its size in place."""

    def died(self, held: Held, time_ns: int) -> None:
        """A storage is gone."""

    def declared(self, storage: torch.UntypedStorage) -> None:
        """A storage is the host's from now on."""
        held = self._held.get(storage._cdata)
        if held is not None and held.place != "host":
            held.place = "host"

    def __enter__(self) -> Self:
        with _entering:
            if not _watches:
                _patch_resize()
            _watches.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            with _entering:
                _watches.remove(self)
                if not _watches:
                    _restore_resize()
            self.drain()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._see(args, found=True)
        if kwargs:
            self._see(kwargs.values(), found=True)
        if any(map(_unwraps_itself, types)):
            return NotImplemented  # it takes itself apart, and the operators on its parts come by here
        self.operator_ns = time.time_ns()
        out = func(*args, **kwargs)
        self.drain()
        self._see((out,), found=False)
        return out

    def held(self, tensor: torch.Tensor) -> Iterator[Held]:
        """The records of the storages behind a tensor, which count as seen from now on."""
        for part in _parts(tensor):
            record = self._look(part, found=True)
            if record is not None:
                yield record

    def seen(self, tensor: torch.Tensor) -> Iterator[Held]:
        """The records of those storages behind a tensor that were seen before."""
        for part in _parts(tensor):
            record = self._held.get(part.untyped_storage()._cdata) if part.layout is torch.strided else None
            if record is not None and record() is not None:
                yield record

    def drain(self) -> None:
        """Take in the deaths since the last operator."""
        while self._dead:
            time_ns, held = self._dead.popleft()
            if self._held.get(held.key) is held:
                del self._held[held.key]
                self.died(held, time_ns)

    def close(self) -> None:
        """Forget every storage that still lives, and stop listening to its end."""
        self._held.clear()
        self._dead.clear()

    def _see(self, values: Any, found: bool) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                for part in _parts(value):
                    self._look(part, found)
            elif isinstance(value, list | tuple):
                self._see(value, found)
            elif isinstance(value, dict):
                self._see(value.values(), found)

    def _look(self, tensor: torch.Tensor, found: bool) -> Held | None:
        device = tensor.device.type
        if device == "meta" or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        held = self._held.get(storage._cdata)
        if held is None or held() is None:
            return self._admit(storage, device, found)
        if not found:
            self._check_size(held, storage)
        return held

    def _admit(self, storage: torch.UntypedStorage, device: str, found: bool) -> Held:
        self.drain()
        held = Held(storage, self._hear)
        held.key, held.num_bytes, held.owner, held.index = storage._cdata, storage.nbytes(), "", -1
        host = device == "cpu" and (self.device_type != "cpu" or host_name(storage) is not None)
        held.place = "host" if host else "device"
        held.address = 0
        self._held[held.key] = held
        self.born(held, found)
        return held

    def _hear(self, held: Held) -> None:
        self._dead.append((time.time_ns(), held))

    def _check_size(self, held: Held, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        if num_bytes != held.num_bytes:
            old_bytes, held.num_bytes = held.num_bytes, num_bytes
            self.drain()
            self.resized(held, old_bytes)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside a wrapper (DTensor's local tensor, a collective's result), or the tensor itself."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor names its mesh as well
            yield from _parts(part)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_wrappers: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False}


def _unwraps_itself(kind: type) -> bool:
    known = _wrappers.get(kind)
    if known is None:
        known = _wrappers[kind] = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return known


_original: list[Any] = []  # what `resize_` was in UntypedStorage's own namespace, if anything


def _patch_resize() -> None:
    _original[:] = [torch.UntypedStorage.__dict__["resize_"]] if "resize_" in torch.UntypedStorage.__dict__ else []
    inner: _Resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        out = inner(storage, num_bytes)
        for watch in _watches:
            held = watch._held.get(storage._cdata)
            if held is not None:
                watch._check_size(held, storage)
        return out

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]


def _restore_resize() -> None:
    if _original:
        torch.UntypedStorage.resize_ = _original.pop()  # type: ignore[method-assign]
    else:
        del torch.UntypedStorage.resize_
