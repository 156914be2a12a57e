"""What a DTensor keeps on this rank, and tensors sharded like another one.

Plain tensors pass through every function, so callers have one path for both.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from steppe.runtime import collectives


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ranks share this tensor out between them (a DTensor)."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part: the very tensor that holds the memory, outside of any graph."""
    if not isinstance(tensor, DTensor):
        return tensor
    own = tensor._local_tensor
    return own.wait() if hasattr(own, "wait") else own  # a collective may still be filling it


def local_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's own part of `tensor`, laid out over the ranks as `like` is.

    Redistributes (a collective, the same on all ranks) where mesh axes are split otherwise or hold partial sums.
    """
    if isinstance(tensor, DTensor) and isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return local(tensor)


def with_local(like: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A tensor laid out over the ranks as `like` is, whose part on this rank is `own` (any dtype, any device)."""
    if not isinstance(like, DTensor):
        return own
    meta = TensorMeta(like.shape, like.stride(), own.dtype)
    # `from_local` would move the part to the mesh's device; host state of accelerator parameters has to stay.
    return DTensor(own, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)


def replicas(tensor: torch.Tensor, group: collectives.Group) -> int:
    """How many ranks of `group` hold the very same part.

    A plain tensor is held by all. Of a DTensor, the mesh axes that replicate it count; ranks outside its mesh are taken
    to hold other parts (experts of an expert-parallel group lie on a mesh of their own).
    """
    if not isinstance(tensor, DTensor):
        return collectives.size(group)
    count = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            count *= tensor.device_mesh.size(axis)
    return count
