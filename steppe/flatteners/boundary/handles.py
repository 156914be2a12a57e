"""Handles: what autograd holds instead of a packed tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from steppe.flatteners.boundary.crossing import Crossing
from steppe.flatteners.boundary.parcels import layout

if TYPE_CHECKING:
    from steppe.flatteners.boundary.replay import Replay


class Handle(Protocol):
    """One packed tensor. `last` says that this is the crossing's own use of it, not a look for somebody else."""

    def tensor(self, *, last: bool = True) -> torch.Tensor: ...


class VersionGuard:
    """Notices in-place changes of a tensor without keeping its memory: a probe that shares its version counter."""

    __slots__ = ("_kind", "_probe", "_size", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version, self._kind, self._size = tensor._version, tensor.type(), list(tensor.size())
        self._probe = alias(tensor)
        self._probe.data = torch.empty(0, device=tensor.device)

    def check(self) -> None:
        """Raises RuntimeError in autograd's words."""
        if self._probe._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._kind} {self._size}] is at version {self._probe._version}; expected version {self._version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True)."
            )


class Stay:
    """A tensor that is left alone: a parameter, a constant, something small, or what the policy keeps."""

    __slots__ = ("_crossing", "_guard", "_tensor")

    def __init__(self, tensor: torch.Tensor, crossing: Crossing | None = None) -> None:
        plain = type(tensor) is torch.Tensor and not tensor.is_inference()
        self._tensor = alias(tensor) if plain else tensor
        self._guard = VersionGuard(tensor) if plain or type(tensor) is nn.Parameter else None
        self._crossing = crossing

    def tensor(self, *, last: bool = True) -> torch.Tensor:
        if self._guard is not None:
            self._guard.check()
        if last and self._crossing is not None:
            self._crossing.chain.arrive(self._crossing)
        return self._tensor


class Moved:
    """A tensor that may lie on the host: its parcel, its geometry there, its version."""

    __slots__ = ("_crossing", "_geometry", "_guard", "_parcel")

    def __init__(self, tensor: torch.Tensor, crossing: Crossing, *, stays: bool) -> None:
        self._crossing = crossing
        self._guard = VersionGuard(tensor)
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._parcel = crossing.hold(tensor, stays=stays)

    def tensor(self, *, last: bool = True) -> torch.Tensor:
        self._guard.check()
        if last:
            self._crossing.chain.arrive(self._crossing)
        return self._parcel.view(self._parcel.take(self._crossing.number, last=last), *self._geometry)


class Remade:
    """A tensor that the previous block makes again: output `place` of its replay."""

    __slots__ = ("_crossing", "_guard", "_place", "_replay")

    def __init__(self, tensor: torch.Tensor, crossing: Crossing, replay: Replay, place: int) -> None:
        self._crossing, self._replay, self._place = crossing, replay, place
        self._guard = VersionGuard(tensor)

    def tensor(self, *, last: bool = True) -> torch.Tensor:
        self._guard.check()
        if last:
            self._crossing.chain.arrive(self._crossing)
        return self._replay.output(self._place)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside of every graph, with the same version counter (below autograd too)."""
    with torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def reason_to_stay(tensor: torch.Tensor, device: torch.device, min_bytes: int) -> str:
    """Why a tensor is left alone wherever it appears; empty when it may move."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return "parameter"
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_inference():
        return "not a plain tensor"
    if tensor.device != device:
        return "another device"
    if tensor.numel() * tensor.element_size() < min_bytes:
        return "tiny"
    return "overlapping" if layout(tensor) == "overlap" else ""
