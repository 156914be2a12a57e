"""What a DTensor keeps on this rank, and tensors sharded like another one.

Plain tensors pass through every function, so callers have one path for both.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from steppe.core.errors import ShapeError
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


def flat_range(tensor: torch.Tensor) -> tuple[int, int]:
    """[start, stop) of the whole tensor's row-major elements that this rank holds: all of a plain tensor's.

    Raises: ShapeError for a tensor that is split along another dimension than the first.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    if any(placement.is_shard() and placement.dim != 0 for placement in tensor.placements):
        raise ShapeError(
            "a sharded tensor", got=f"placements {tensor.placements}", allowed="shards of the first dimension",
            remedy="shard with fully_shard's default placement",
        )  # fmt: skip
    own, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 1
    start = offset[0] * row if offset and own[0] else 0
    return start, start + (own[0] * row if own else 1)


def answers_for(tensor: torch.Tensor, group: collectives.Group) -> bool:
    """Whether this rank is the first of those of `group` that hold the very same part."""
    if not isinstance(tensor, DTensor):
        return collectives.rank(group) == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(place for place, placed in zip(coordinate, tensor.placements) if placed.is_replicate())
