"""Making a boundary again: the previous block runs once more, saving nothing, with the random state it had."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import get_device_states, set_device_states

from steppe.flatteners.boundary.crossing import Crossing
from steppe.flatteners.boundary.handles import Handle
from steppe.runtime import scopes


class Surroundings:
    """Random state and autocast of one forward, to be put back around a replay."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._type = device.type
        self._rng = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        kinds = dict.fromkeys((device.type, "cpu"))
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type=self._type))
            torch.set_rng_state(self._rng)
            set_device_states(self._devices, self._states, device_type=self._type)
            for kind, enabled, dtype, cache in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


class Replay:
    """How to run one block again for its output.

    Exactness: bitwise, with gradient mode on as in the first forward (kernels may be chosen by it); what autograd
    would save is dropped. Top-k choices and kept results are those of the first forward.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        crossing: Crossing,
        inputs: Sequence[tuple[Handle, bool]],
        surroundings: Surroundings,
        again: Callable[[], contextlib.AbstractContextManager[object]],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        self.crossing = crossing
        self._fn, self._inputs, self._surroundings, self._again = fn, inputs, surroundings, again
        self._outputs = [(StorageWeakRef(t.untyped_storage()), _geometry(t), t._version) for t in outputs]

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Which output `tensor` is, unchanged; None when it is none of them."""
        cdata = tensor.untyped_storage()._cdata
        for place, (storage, geometry, version) in enumerate(self._outputs):
            if storage.cdata == cdata and geometry == _geometry(tensor) and version == tensor._version:
                return place
        return None

    def output(self, place: int) -> torch.Tensor:
        """Run the block again. Peak: its working set, without what a backward would need."""
        self.crossing.chain.transit.counts.replays += 1
        with scopes.fresh(), self._surroundings.again(), torch.enable_grad(), _saving_nothing(), self._again():
            inputs = [handle.tensor(last=False).detach().requires_grad_(grad) for handle, grad in self._inputs]
            return tensors_of(self._fn(*inputs))[place].detach()


def _saving_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _never)


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("a replay has no backward")


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts: Any = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def unshard(modules: Sequence[nn.Module]) -> None:
    """Gather the weights of FSDP2 blocks that a replay needs; their own backward finds them gathered."""
    for module in modules:
        for part in module.modules():
            gather = getattr(part, "unshard", None)
            if callable(gather):
                gather()
