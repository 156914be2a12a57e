"""The groups of the method over one set of ranks, as device meshes: one for each purpose, made in one order.

FSDP2 spans all W ranks. A flattener that shares something among a few ranks names a size of `MeshShape` ("expert",
"vocab") and gets a mesh of two axes: (W / size replicas, size). Each has communicators of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steppe.core.errors import ConfigError
from steppe.core.shapes import MeshShape
from steppe.runtime import collectives

DENSE_AXIS = "fsdp"


@dataclass(frozen=True)
class Meshes:
    """`dense` over all ranks; `of(size, axes)` for a group size of the shape. Without ranks everything is None."""

    shape: MeshShape
    device_type: str
    dense: DeviceMesh | None
    node_share: tuple[int, int] = (0, 1)  # this rank's place among its node's ranks, and their number
    made: dict[tuple[str, str], DeviceMesh] = field(default_factory=dict)

    def of(self, size: str, axes: tuple[str, str]) -> DeviceMesh | None:
        """The (replicas, members) mesh of one group size, made at the first call: all ranks call in the same order."""
        if self.dense is None:
            return None
        if axes not in self.made:
            members = getattr(self.shape, size)
            shape = (self.shape.world // members, members)
            self.made[axes] = init_device_mesh(self.device_type, shape, mesh_dim_names=axes)
        return self.made[axes]

    def sequence_group(self) -> collectives.Group:
        """This rank's D ranks of a sequence; neighbours share one."""
        size = self.shape.sequence
        if size == 1:
            return None
        starts = range(0, self.shape.world, size)
        groups = [collectives.new_group(range(start, start + size)) for start in starts]
        return groups[collectives.rank(collectives.world()) // size]


def make_meshes(shape: MeshShape | None, device: torch.device, *, copies: bool = False) -> Meshes:
    """The meshes of a shape over the initialised world; None: all ranks, every group of one.

    One rank is as no ranks, unless it wants `copies` of its weights in another type: FSDP2 would gather a copy of every
    block all the same.

    Raises: ConfigError when the shape isn't that of the ranks there are.
    """
    world: Any = collectives.world()
    num_ranks = collectives.size(world)
    shape = shape or MeshShape(world=num_ranks)
    if shape.world != num_ranks:
        raise ConfigError(
            "mesh", got=f"a shape of {shape.world} ranks", allowed=f"the {num_ranks} ranks of this job",
            remedy="start that many ranks (torchrun --nproc-per-node), or give their number in the mesh",
        )  # fmt: skip
    alone = world is None or (num_ranks == 1 and not copies)
    dense = None if alone else init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(DENSE_AXIS,))
    return Meshes(shape, device.type, dense, collectives.node_share(world))
