"""Ledger entries and verdicts of the dispatch peak, from integers alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from steppe.core.errors import ConfigError
from steppe.core.ledger import Ledger, Moment
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import GiB
from steppe.flatteners.dispatch.budget import DispatchPolicy, cost, entries, layer_of, pays

PAPER = ModelShape(
    model_type="toy", hidden=7168, num_layers=8, vocab=200_000, num_heads=64, num_kv_heads=8, head_dim=128,
    dense_width=18_432, num_experts=128, experts_per_token=8, expert_width=2048,
)  # fmt: skip
RUN = RunShape(PAPER, BatchShape(65_536), MeshShape(world=8, expert=8))
DENSE = replace(PAPER, num_experts=0)


def peak(run: RunShape, policy: object) -> int:
    return Ledger.from_entries(entries(run, policy)).peaks["dispatch"]


def test_the_flat_peak_depends_on_the_chunk_and_falls_with_it() -> None:
    peaks = [peak(RUN, DispatchPolicy(micro_chunks=n)) for n in (5, 10, 20)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.3 * peak(RUN, OFF)
    workspaces = [cost(layer_of(RUN), DispatchPolicy(micro_chunks=n)).workspace for n in (5, 10)]
    assert 1.99 < workspaces[0] / workspaces[1] < 2.01


def test_the_plain_program_holds_every_route() -> None:
    rows = 65_536 * 8 * 7168 * 2
    assert peak(RUN, OFF) > 6 * rows
    doubled = replace(RUN, batch=BatchShape(131_072))
    assert peak(doubled, OFF) == 2 * peak(RUN, OFF)


def test_entries_name_their_owner_and_stand_in_forward_or_backward() -> None:
    for policy in (OFF, DispatchPolicy()):
        for entry in entries(RUN, policy):
            assert entry.owner in ("dispatch", "gathered", "router")
            assert entry.during & {Moment.FORWARD, Moment.BACKWARD}


@pytest.mark.parametrize(("world", "gathered"), [(2, False), (4, True)])
def test_the_routers_gradient_counts_where_it_exceeds_what_the_experts_backward_holds(
    world: int, gathered: bool
) -> None:
    model = replace(PAPER, hidden=512, num_experts=4, experts_per_token=2, expert_width=16)
    wide = Dtypes("float32", "float32", "float32", "float32")
    run = RunShape(model, BatchShape(4096 * world), MeshShape(world=world, expert=2), MachineShape(device="cpu"), wide)
    policy = DispatchPolicy(chunk_tokens=64)

    def router(run: RunShape) -> int:
        return sum(entry.num_bytes for entry in entries(run, policy) if entry.owner == "router")

    layer = layer_of(run)
    held = cost(layer, policy)
    native = 2 * 3 * 512 * 16 * 4 if gathered else 0
    assert router(run) == layer.num_tokens * 512 * 4 - held.tile - native > 0
    narrow = replace(run, dtypes=Dtypes())
    layer = layer_of(narrow)
    held = cost(layer, policy)
    during = held.token_gradients + held.rounded + held.gradient_sums + held.weight_gradients * gathered
    assert held.rounded > held.tile
    assert router(narrow) == layer.num_tokens * 512 * 16 - during > 0  # the norm's float32 math, see the docstring


def test_plain_rows_weighed_by_float32_route_weights_are_twice_as_wide_at_the_combine() -> None:
    """Mixtral, GLM-4-MoE and DeepSeek-V3 don't round their route weights to the rows' type."""
    widened = replace(PAPER, has_float32_routes=True)
    rows = 65_536 * 8 * 7168 * 2
    assert peak(replace(RUN, model=widened), OFF) - peak(RUN, OFF) == 3 * rows
    wide = Dtypes("float32", "float32", "float32", "float32")
    assert peak(replace(RUN, model=widened, dtypes=wide), OFF) == peak(replace(RUN, dtypes=wide), OFF)


def test_a_dense_model_has_no_dispatch() -> None:
    assert entries(replace(RUN, model=DENSE), DispatchPolicy()) == ()
    verdict = pays(replace(RUN, model=DENSE), MachineShape())
    assert not verdict.on
    assert "no experts" in verdict.why


def test_verdicts_say_why_with_numbers() -> None:
    on = pays(RUN, MachineShape(device_memory_bytes=141 * 10**9))
    assert on.on
    assert "E 128, k 8" in on.why
    assert "GiB" in on.why
    few = replace(RUN, model=replace(PAPER, num_experts=8, experts_per_token=1), batch=BatchShape(1024))
    assert not pays(few, MachineShape()).on


def test_a_chunk_of_bytes_below_one_token_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match="one token a source"):
        cost(layer_of(RUN), DispatchPolicy(chunk_bytes=1000))
    assert cost(layer_of(RUN), DispatchPolicy()).workspace <= GiB


def test_the_integer_half_loads_no_torch() -> None:
    names = ("budget", "plan", "schedule", "profiles")
    code = "; ".join(f"import steppe.flatteners.dispatch.{n}" for n in names)
    check = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
