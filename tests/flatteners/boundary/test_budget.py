"""The integer half: policy, entries and verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.errors import ConfigError
from steppe.core.ledger import STEP, Ledger, Moment
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, MachineShape, MeshShape, ModelShape, RunShape
from steppe.flatteners.boundary import budget
from steppe.flatteners.boundary.budget import BoundaryPolicy
from steppe.flatteners.boundary.schedule import NoPlan

MODEL = ModelShape("qwen3_moe", hidden=2048, num_layers=48, vocab=151936, num_heads=32, num_kv_heads=4, head_dim=128,
                   dense_width=6144, num_experts=128, experts_per_token=8, expert_width=768)  # fmt: skip
SHAPE = RunShape(MODEL, BatchShape(65536), MeshShape(world=8, sequence=8))
SIZE = 65536 // 8 * 2048 * 2


def peak(entries, place="device", moments=STEP - {Moment.FORWARD}):
    held = Ledger.from_entries(entries, moments=moments if place == "device" else STEP)
    return held.peaks["boundary"] if place == "device" else held.host_bytes


def test_plain_checkpointing_holds_every_boundary_on_the_device():
    assert peak(budget.entries(SHAPE, OFF)) == 48 * SIZE
    assert peak(budget.entries(SHAPE, OFF), "host") == 0


def test_offloading_leaves_two_boundaries_and_puts_the_others_on_the_host():
    entries = budget.entries(SHAPE, BoundaryPolicy(pin_topk=False))
    assert peak(entries) == 2 * SIZE
    assert peak(entries, "host") == 47 * SIZE
    assert sum(e.num_bytes for e in entries if Moment.LOSS in e.during and e.place == "device") == SIZE


@pytest.mark.parametrize(("layers", "boundaries"), [(1, 1), (2, 2), (3, 3), (4, 4), (48, 4)])
def test_the_forward_holds_at_most_four_whatever_the_depth(layers, boundaries):
    """The last one made, the input of the block that makes it, the one whose copy may still run, the embeddings."""
    shape = replace(SHAPE, model=replace(MODEL, num_layers=layers))
    entries = budget.entries(shape, BoundaryPolicy(pin_topk=False))
    assert peak(entries, moments=STEP) == boundaries * SIZE
    kept = budget.entries(shape, BoundaryPolicy("keep", pin_topk=False))
    assert peak(kept, moments=STEP) == layers * SIZE


def test_kept_and_recomputed_boundaries_are_counted_where_they_are():
    policy = BoundaryPolicy(per_boundary={3: "keep", 5: "recompute", 47: "keep"}, pin_topk=False)
    assert peak(budget.entries(SHAPE, policy)) == 3 * SIZE  # two kept, one in transit
    assert peak(budget.entries(SHAPE, policy), "host") == 45 * SIZE


def test_recomputing_the_last_boundary_frees_nothing():
    policy = BoundaryPolicy(per_boundary={47: "recompute"}, pin_topk=False)
    assert peak(budget.entries(SHAPE, policy)) == 2 * SIZE


def test_extras_and_pinned_choices_have_entries_of_their_own():
    tokens = 65536 // 8
    plain = peak(budget.entries(SHAPE, BoundaryPolicy(pin_topk=False)), "host")
    pinned = peak(budget.entries(SHAPE, BoundaryPolicy()), "host") - plain
    assert pinned == 47 * tokens * 8 * 4
    both = BoundaryPolicy(offload_extra=("aten._scaled_dot_product_flash_attention", "kv"), pin_topk=False)
    extra = peak(budget.entries(SHAPE, both), "host") - plain
    assert extra == 47 * (tokens * 32 * (128 * 2 + 4) + 2 * tokens * 4 * 128 * 2)


def test_one_block_has_nothing_in_transit():
    shape = replace(SHAPE, model=replace(MODEL, num_layers=1))
    assert peak(budget.entries(shape, BoundaryPolicy(pin_topk=False))) == SIZE


def test_host_blocks_are_one_less_than_the_layers():
    assert budget.host_blocks(SHAPE, BoundaryPolicy()) == ((SIZE, 47),)
    assert budget.host_blocks(SHAPE, BoundaryPolicy("keep")) == ()


def test_the_fastest_policy_keeps_what_the_device_has_room_for():
    machine = MachineShape()
    roomy = budget.fastest_policy(SHAPE, machine, device_bytes=48 * SIZE, host_bytes=0)
    assert not isinstance(roomy, NoPlan)
    assert set(roomy[0].choices(48)) == {"keep"}
    fast, free = budget.fastest_policy(SHAPE, machine, device_bytes=10 * SIZE, host_bytes=60 * SIZE)
    assert set(fast.choices(48)[:-1]) == {"offload"}
    assert free.added_ns == 0
    slow_link = MachineShape(to_device_rate=1e8)
    slow, dear = budget.fastest_policy(SHAPE, slow_link, device_bytes=20 * SIZE, host_bytes=60 * SIZE)
    assert slow.choices(48).count("keep") == 19  # and one in transit
    assert dear.added_ns > 0
    for policy, found in ((fast, free), (slow, dear)):
        entries = budget.entries(SHAPE, replace(policy, pin_topk=False))
        assert (peak(entries), peak(entries, "host")) == (found.device_bytes, found.host_bytes)
    assert budget.fastest_policy(SHAPE, machine, device_bytes=SIZE, host_bytes=60 * SIZE) == NoPlan(2 * SIZE, SIZE)


def test_it_pays_on_a_fast_link_and_not_below_the_prior():
    assert budget.pays(SHAPE, MachineShape()).on
    slow = budget.pays(SHAPE, MachineShape(to_device_rate=15e9))
    assert not slow.on
    assert "16 GB/s" in slow.why


def test_it_does_not_pay_when_the_reload_outlasts_the_recompute():
    short = replace(SHAPE, batch=BatchShape(512), mesh=MeshShape())
    verdict = budget.pays(short, MachineShape(matmul_rate=1e18))
    assert not verdict.on
    assert "reload" in verdict.why


def test_two_blocks_are_left_alone():
    assert not budget.pays(replace(SHAPE, model=replace(MODEL, num_layers=2)), MachineShape()).on


@pytest.mark.parametrize(
    "bad",
    [
        {"default": "drop"},
        {"per_boundary": {0: "recompute"}},
        {"per_boundary": ("offload", "somewhere")},
        {"offload_extra": "attention"},
        {"compile": "everything"},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ConfigError, match="Remedy"):
        BoundaryPolicy(**bad)


def test_the_three_ways_to_say_a_plan_are_one():
    by_map = BoundaryPolicy(per_boundary={1: "keep", 2: "recompute"})
    assert by_map == BoundaryPolicy(per_boundary=((1, "keep"), (2, "recompute")))
    assert by_map.choices(4) == ("offload", "keep", "recompute", "offload")
    assert BoundaryPolicy(per_boundary=("keep", "keep")).choices(3) == ("keep", "keep", "offload")
    assert BoundaryPolicy("recompute").choices(2) == ("offload", "recompute")
    assert hash(by_map) == hash(BoundaryPolicy(per_boundary={1: "keep", 2: "recompute"}))


def test_operators_and_labels_are_told_apart():
    policy = BoundaryPolicy(offload_extra=["aten.mm", "kv"])
    assert policy.operators == ("aten.mm",)
    assert policy.labels == ("kv",)
