"""The Meter against the allocator's own events, at the peak of a training step, on 1 and 2 FSDP2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from steppe.runtime.allocator import allocator_peak
from steppe.runtime.attribution import attribute
from steppe.runtime.meter import Meter
from tests.support.float64 import toy_model
from tests.support.peaks import assert_peak
from tests.support.ranks import run_ranks

LAYERS, HIDDEN, VOCAB, BATCH, LENGTH = 4, 64, 2048, 2, 128
TOKENS = BATCH * LENGTH
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}


def metered_run() -> Meter:
    """A toy Qwen3-MoE made and trained for two steps inside the Meter, so that it and the allocator see all of it."""
    with Meter() as meter:
        model = toy_model("qwen3_moe", **SHAPE)
        model.train()
        model.activation_checkpointing_enable()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        meter.register(model, optimizer)
        handle = attribute(model)
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            meter.mark("step")
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
    return meter


def compare(rank: int, world_size: int) -> dict[str, Any]:
    found = allocator_peak(metered_run)
    ledger = found.result.ledger(since="step")
    return {
        "allocator": found.peak_bytes,
        "meter": found.result.ledger().device_peak_bytes,
        "peaks": dict(ledger.peaks),
        "holders": dict(ledger.holders),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_meter_is_within_one_percent_of_the_allocator_at_the_peak_of_a_sharded_step(world_size):
    for found in run_ranks(compare, world_size):
        assert_peak(found["allocator"], found["meter"], found["meter"] // 100, "scratch inside operators")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sharded_step_is_attributed_to_its_owners(world_size):
    model = toy_model("qwen3_moe", **SHAPE)
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    root = 4 * sum(p.numel() for p in model.parameters()) - LAYERS * layer
    small = 4096  # scalars, index buffers, rotary frequencies and the padding of shards
    for found in run_ranks(compare, world_size):
        peaks = found["peaks"]
        assert_peak(peaks["boundary"], LAYERS * TOKENS * HIDDEN * 4, 0, "boundaries are nothing else")
        assert_peak(peaks["vocab"], 3 * TOKENS * VOCAB * 4, small, "scalars of the mean")
        assert_peak(peaks["weights"], (root + LAYERS * layer) // world_size, small, "rotary frequencies, padding")
        assert_peak(peaks["gradients"], (root + LAYERS * layer) // world_size, small, "padding of shards")
        assert_peak(peaks["gathered"], 2 * root, 2 * layer, "a layer gathered ahead, and its flat buffer")
        assert found["holders"]["vocab"] == peaks["vocab"]


def multiply_shards(rank: int, world_size: int) -> tuple[int, int]:
    """Both factors are sharded over their rows, so that DTensor has to move one inside the operator."""
    mesh = init_device_mesh("cpu", (world_size,))
    left, right = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)]) for _ in range(2))
    with Meter() as meter:
        product = left @ right
    held = sum(t.to_local().nbytes for t in (left, right, product))
    return meter.ledger().device_peak_bytes, held


def test_what_a_dtensor_makes_inside_an_operator_is_seen():
    for measured, held in run_ranks(multiply_shards, 2):
        assert measured > held
