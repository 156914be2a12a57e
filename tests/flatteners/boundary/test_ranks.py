"""Bitwise on one and two ranks under FSDP2, with every choice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from steppe import BoundaryPolicy
from tests.support.exactness import assert_bitwise
from tests.support.ranks import run_ranks

PLANS = {"offload": (), "mixed": ("offload", "keep", "recompute", "offload", "recompute")}


def sharded(make: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.flatteners.boundary.programs import Language, Stack, seeded

    model = seeded(Stack if make == "stack" else lambda: Language(num_hidden_layers=5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers if make == "stack" else model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_rank(rank: int, world_size: int, make: str, plan: tuple[str, ...]) -> dict[str, torch.Tensor]:
    from tests.flatteners.boundary.programs import gradients, plainly, rough_sco, with_sco

    def local(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: getattr(t, "_local_tensor", t).clone() for name, t in results.items()}

    model = sharded(make)
    undo = plainly(model)
    seeds = (rank, rank + world_size)
    plain = local(gradients(model, seeds=seeds))
    undo()
    sco = rough_sco(BoundaryPolicy(per_boundary=plan, min_bytes=0), seed=rank)
    with_sco(model, sco)
    ours = local(gradients(model, seeds=seeds))
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        assert_bitwise(ours[name], expected, f"rank {rank} {name}")
    moved = sco.stats().bytes_offloaded
    sco.close()
    assert sco.stats().bytes_lent == 0
    return {"moved": torch.tensor(moved), "gradients": torch.tensor(len(plain))}


GRID = [(make, plan, world_size) for make in ("qwen3_moe", "stack") for plan in sorted(PLANS) for world_size in (1, 2)]
QUICK = {("qwen3_moe", "offload", 1), ("qwen3_moe", "offload", 2), ("qwen3_moe", "mixed", 2), ("stack", "mixed", 1)}


@pytest.mark.parametrize(
    ("make", "plan", "world_size"), [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in GRID]
)
def test_gradients_are_bitwise_under_fsdp2(make, plan, world_size):
    for result in run_ranks(on_rank, world_size, make, PLANS[plan]):
        assert result["moved"] > 0
        assert result["gradients"] > 10
