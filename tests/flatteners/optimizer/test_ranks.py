"""FSDP2 on 1, 2 and 4 ranks: the same training, one norm, states that reshard, decisions that ranks share."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from steppe.flatteners.optimizer import reference
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.attach import conflicts
from steppe.flatteners.optimizer.norms import clip_grad_norm_
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.ranks import run_ranks

from .programs import hazardous

WIDTH = 12
WORLDS = [1, 2, 4]


class Tied(nn.Module):
    """Embedding and head are one parameter; a row count that no world size divides, so shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(1))  # empty on all ranks but the first
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * self.norm)


def _model(dtype: torch.dtype, *, sharded: bool = True) -> Tied:
    torch.manual_seed(11)
    model = Tied().to(dtype)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _loss(model: nn.Module, step: int, part: int, micro_batches: int) -> torch.Tensor:
    ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(100 * step + part))
    return nn.functional.cross_entropy(model(ids).float(), ids.roll(1)) / micro_batches


def _train(model: nn.Module, optimizer: Any, steps: range, micro_batches: int) -> list[float]:
    norms = []
    for step in steps:
        for part in range(micro_batches):
            if isinstance(optimizer, OffloadStreamAdamW):
                optimizer.set_is_last_backward(part == micro_batches - 1)
            _loss(model, step, part, micro_batches).backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return norms


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _train_sharded(rank: int, world: int, dtype: torch.dtype, micro_batches: int, settings: dict[str, Any]) -> Any:
    wiring = {"wiring": hazardous(rank)} if settings.pop("lanes", False) else {}
    model = _model(dtype)
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2, max_norm=0.5, bucket_bytes=4096, **settings, **wiring)
    optimizer.materialize()
    norms = _train(model, optimizer, range(3), micro_batches)
    masters = {name: _full(optimizer.state[p]["master"]) for name, p in model.named_parameters()}
    return norms, masters, {name: _full(p) for name, p in model.named_parameters()}


class _Plain(reference.SerialOffload):
    """torch's AdamW on one process, clipped by torch."""

    grad_norm = 0.0

    def step(self) -> None:  # type: ignore[override]
        super().step(max_norm=0.5)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


SETTINGS = [
    {},
    {"overlap_backward": True},
    {"overlap_backward": True, "lanes": True},
    {"update": "device", "lanes": True},
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sharded_training_is_the_plain_programs(world: int, settings: dict[str, Any], micro_batches: int) -> None:
    results = run_ranks(_train_sharded, world, torch.float32, micro_batches, settings)
    assert all(result[0] == results[0][0] for result in results), "all ranks have the same norms"
    plain_model = _model(torch.float32, sharded=False)
    plain = _Plain(list(plain_model.parameters()), lr=1e-2, foreach=False)
    _train(plain_model, plain, range(3), micro_batches)
    truth = _truth(micro_batches)
    for (name, ours), theirs in zip(results[0][1].items(), plain_model.parameters()):
        length = 5 * 3 * micro_batches * WIDTH  # tokens, steps, and the width of the matmuls
        assert_reordered(ours, theirs.detach(), truth[name], length=length, what=f"master of {name}")


def _truth(micro_batches: int) -> dict[str, torch.Tensor]:
    model = _model(torch.float32, sharded=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for part in range(micro_batches):
            ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(100 * step + part))
            (nn.functional.cross_entropy(model(ids), ids.roll(1)) / micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_on_equal_ranks_overlap_and_delays_change_no_bit() -> None:
    plain = run_ranks(_train_sharded, 2, torch.bfloat16, 1, {})
    for settings in SETTINGS[1:]:
        ours = run_ranks(_train_sharded, 2, torch.bfloat16, 1, dict(settings))
        assert ours[0][0] == plain[0][0]
        for name, master in ours[0][1].items():
            assert_bitwise(master, plain[0][1][name], f"{name} under {settings}")


def _mixed_meshes(rank: int, world: int) -> tuple[float, float, list[torch.Tensor]]:
    """Dense parameters over all ranks, experts over a 2-D mesh, replicas of HSDP, and a plain replicated tensor."""
    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    values = torch.arange(1.0, 1.0 + 4 * 6 * 2).view(4, 6, 2)
    laid_out = [
        (distribute_tensor(values, flat, [Shard(0)])),
        (distribute_tensor(values * 2, grid, [Shard(1), Shard(0)])),
        (distribute_tensor(values * 3, grid, [Replicate(), Shard(0)])),
        values * 4,
    ]
    held = [nn.Parameter(torch.zeros_like(value)) for value in laid_out]
    for parameter, value in zip(held, laid_out):
        parameter.grad = value
    norm = clip_grad_norm_(held, 1.0)
    exact = math.sqrt(sum(float(v) ** 2 for factor in (1, 2, 3, 4) for v in (values * factor).flatten()))
    return norm.item(), exact, [_full(parameter.grad) for parameter in held]


@pytest.mark.parametrize("world", [2, 4])
def test_parameters_of_different_meshes_count_once_each(world: int) -> None:
    for norm, exact, clipped in run_ranks(_mixed_meshes, world):
        assert norm == pytest.approx(exact, rel=1e-15)
        assert reference.grad_norm(clipped) == pytest.approx(1.0, rel=1e-5)


def _missing_on_one_rank(rank: int, world: int) -> tuple[float | None, int]:
    """One rank has no gradient at all, another has a NaN: all take the same decision and nobody hangs."""
    mesh = init_device_mesh("cpu", (world,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(world * 2), mesh, [Shard(0)]))
    optimizer = OffloadStreamAdamW([parameter], max_norm=1.0)
    if rank != 0:
        parameter.grad = distribute_tensor(torch.ones(world * 2), mesh, [Shard(0)], src_data_rank=None)
    optimizer.step()
    first = optimizer.grad_norm
    parameter.grad = DTensor.from_local(torch.full((2,), math.nan if rank == 1 else 1.0), mesh, [Shard(0)])
    optimizer.step()
    return first, optimizer.num_skipped


def test_ranks_without_gradients_and_with_nan_take_the_same_decision() -> None:
    results = run_ranks(_missing_on_one_rank, 2)
    assert results == [(math.sqrt(2.0), 1)] * 2


def _save(rank: int, world: int, folder: str, steps: int) -> None:
    model = _model(torch.bfloat16)
    optimizer = OffloadStreamAdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, range(steps), 1)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}, checkpoint_id=folder)


def _load(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    model = _model(torch.bfloat16)
    optimizer = OffloadStreamAdamW(model.parameters(), lr=5.0)
    state = {"optim": get_optimizer_state_dict(model, optimizer), "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for parameter in model.parameters():
        own = optimizer.state[parameter]["master"]
        assert isinstance(own, DTensor)
        assert own.dtype == torch.float32
    found = {}
    for name, parameter in model.named_parameters():
        entry = optimizer.state[parameter]
        found |= {f"{name}.{key}": _full(entry[key]) for key in ("step", "master", "exp_avg", "exp_avg_sq")}
    ids = torch.zeros(5, dtype=torch.long)
    model(ids).float().sum().backward()
    optimizer.step()
    return found


def test_a_state_saved_on_2_ranks_loads_on_1_2_and_4_with_the_same_bits() -> None:
    folder = tempfile.mkdtemp(prefix="steppe-optimizer-")
    try:
        run_ranks(_save, 2, str(Path(folder) / "state"), 2)
        loaded = [run_ranks(_load, world, str(Path(folder) / "state"))[0] for world in (2, 1, 4)]
    finally:
        shutil.rmtree(folder)
    for other in loaded[1:]:
        for key, value in loaded[0].items():
            assert_bitwise(other[key], value, key)
    assert loaded[0]["table.weight.step"].item() == 2


def _cpu_offloaded(rank: int, world: int) -> str:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    (found,) = conflicts(model, OffloadStreamAdamW(model.parameters()))
    return found.what


def test_fsdps_own_cpu_offload_is_a_conflict() -> None:
    assert "CPUOffloadPolicy" in run_ranks(_cpu_offloaded, 1)[0]


def _plain_state_for_sharded(rank: int, world: int) -> str:
    optimizer = OffloadStreamAdamW(_model(torch.float32).parameters())
    optimizer.materialize()
    alone = OffloadStreamAdamW(_model(torch.float32, sharded=False).parameters())
    alone.materialize()
    try:
        optimizer.load_state_dict(alone.state_dict())
    except ValueError as refusal:
        return str(refusal)
    return "loaded"


def test_a_whole_state_is_refused_by_a_sharded_optimizer_with_the_way_to_reshard_it() -> None:
    assert "torch.distributed.checkpoint" in run_ranks(_plain_state_for_sharded, 2)[0]
