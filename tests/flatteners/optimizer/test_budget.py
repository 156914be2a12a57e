"""The optimizer's ledger entries, its thresholds and its modelled time."""

from __future__ import annotations

import pytest

from steppe.core.ledger import EARLY_GRADIENTS, GRADIENT_SHARDS, Ledger, Moment
from steppe.core.parameters import parameters_per_rank
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import MiB
from steppe.flatteners.optimizer.budget import OptimizerPolicy, entries, pays, replaces, stage_seconds

MODEL = ModelShape("qwen3_moe", hidden=2048, num_layers=48, vocab=151_936, num_heads=32, num_kv_heads=4, head_dim=128,
                   dense_width=6144, num_experts=128, experts_per_token=8, expert_width=768)  # fmt: skip


def _shape(world: int = 8, **dtypes: str) -> RunShape:
    return RunShape(MODEL, BatchShape(4096), MeshShape(world=world), dtypes=Dtypes(**dtypes))


def test_the_plain_program_holds_moments_masters_and_foreachs_transient() -> None:
    shape = _shape()
    count = parameters_per_rank(MODEL, 8)
    peaks = Ledger.from_entries(entries(shape, OFF)).peaks
    assert peaks["optimizer"] == 16 * count, "12 bytes of state and 4 of the transient"
    full = Ledger.from_entries(entries(_shape(weight="float32", gradient="float32"), OFF)).peaks
    assert full["optimizer"] == 12 * count, "float32 weights are their own masters"


def test_nothing_is_left_on_the_device_and_12_bytes_a_parameter_are_on_the_host() -> None:
    shape, policy = _shape(), OptimizerPolicy()
    ledger = Ledger.from_entries(entries(shape, policy))
    count = parameters_per_rank(MODEL, 8)
    assert ledger.peaks["optimizer"] == 0
    assert ledger.host_bytes == 12 * count + 2 * 2 * policy.bucket_bytes


@pytest.mark.parametrize(("slots", "bucket"), [(2, 128 * MiB), (3, 64 * MiB)])
def test_the_device_update_is_bounded_by_slots_times_bucket(slots: int, bucket: int) -> None:
    policy = OptimizerPolicy(bucket_bytes=bucket, slots=slots, update="device")
    ledger = Ledger.from_entries(entries(_shape(), policy))
    assert slots * bucket * 29 // 30 <= ledger.peaks["optimizer"] <= slots * bucket
    assert ledger.moment == Moment.UPDATE


def test_overlap_replaces_the_waiting_gradients_by_those_in_flight() -> None:
    policy = OptimizerPolicy(overlap_backward=True)
    assert set(replaces(policy)) == {GRADIENT_SHARDS, EARLY_GRADIENTS}
    assert replaces(OptimizerPolicy()) == ()
    found = {entry.tensor: entry for entry in entries(_shape(), policy)}
    assert found["gradients on their way to the host"].num_bytes == 2 * policy.bucket_bytes
    assert found["gradient sums"].num_bytes == 4 * parameters_per_rank(MODEL, 8)


def test_state_stays_on_the_device_below_half_of_its_memory() -> None:
    machine = MachineShape(device_memory_bytes=141 * 10**9)
    assert pays(_shape(world=4), machine).on
    verdict = pays(_shape(world=64), machine)
    assert not verdict.on
    assert "below 50%: it stays there" in verdict.why


def test_a_host_that_is_too_small_is_named() -> None:
    verdict = pays(_shape(world=4), MachineShape(host_memory_bytes=10**11))
    assert not verdict.on
    assert "4 ranks would need" in verdict.why


def test_the_slowest_stage_is_modelled_from_the_machines_rates() -> None:
    shape = _shape()
    count = parameters_per_rank(MODEL, 8)
    machine = MachineShape(to_host_rate=20e9, to_device_rate=25e9, adamw_rate=8e9)
    assert stage_seconds(shape, machine) == {
        "to_host": 2 * count / 20e9, "update": 8 * count / 8e9, "to_device": 2 * count / 25e9,
    }  # fmt: skip
    assert stage_seconds(shape, machine, OptimizerPolicy(update="device"))["fetch"] == 12 * count / 25e9
