"""Work counted: GEMM passes, rows on the wire, travelling weights, host syncs; hazards of one rank's lane."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steppe.flatteners.dispatch import telemetry
from tests.flatteners.dispatch import on_ranks
from tests.flatteners.dispatch.cases import FORMS, Case, flat, gradients, make_experts, make_inputs, new_session
from tests.support.exactness import assert_bitwise
from tests.support.ranks import run_ranks


def passes(case: Case, flops: int, rows: int) -> float:
    """Floating-point operations in units of one forward pass through an expert."""
    return flops / (6 * rows * case.hidden * case.width)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_costs_one_forward_two_thirds_recompute_and_two_backward_passes(form: str) -> None:
    case = Case(form, tokens=(61,))
    session = new_session(case)
    inputs, experts = make_inputs(case, 0), make_experts(case)
    out = flat(session)(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts)
    rows = inputs.expert_ids.numel()
    assert passes(case, session.pool.counters["flops"], rows) == 1
    out.backward(inputs.upstream)
    assert passes(case, session.pool.counters["flops"], rows) == pytest.approx(1 + 2 / 3 + 2)


def test_rows_on_the_wire_are_2h_forward_and_3h_backward() -> None:
    for routing in ("balanced", "95/1"):
        case = Case(routing=routing, tokens=(40, 33), dtype=torch.float32)
        results = [r[0] for r in run_ranks(on_ranks.run_cases, 2, [(case, True)], False)]
        routes = sum(case.tokens) * case.choices
        assert sum(r["counters"]["wire_rows"] for r in results) == (2 + 3) * routes
        numbers = sum(r["counters"]["wire_bytes"] for r in results) - 5 * routes * case.hidden * 4
        assert numbers == 3 * routes * 4  # the route weight out twice, its gradient home once
        assert all(r["counters"]["host_syncs"] == 1 for r in results)
        assert sum(r["counters"]["flops"] for r in results) == round(
            routes * 6 * case.hidden * case.width * (3 + 2 / 3)
        )


def test_a_layers_step_is_one_gather_of_counts_rows_and_weights_and_no_barrier() -> None:
    for routing in ("balanced", "95/1"):
        case = Case(routing=routing, tokens=(40, 0, 33), experts=12)
        for found in run_ranks(on_ranks.counted_collectives, 3, case):
            chunks = found.pop("chunks")
            assert found.pop("batch_isend_irecv", 0) >= 0  # travelling experts
            assert found == {"all_gather": 1, "all_to_all": chunks * (2 + 1 + 3 + 2)}, routing


class HostReads(TorchDispatchMode):
    """Counts operators that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in (
            "_local_scalar_dense",
            "nonzero",
            "item",
            "is_nonzero",
            "equal",
            "unique",
            "bincount",
            "masked_select",
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_but_the_one_copy_of_counts_reads_the_device() -> None:
    case = Case(tokens=(61,))
    session, inputs, experts = new_session(case), make_inputs(case, 0), make_experts(case)
    with HostReads() as reads:
        flat(session)(inputs.tokens, inputs.expert_ids, inputs.route_weights, experts).backward(inputs.upstream)
    assert reads.seen == []
    assert session.pool.counters["host_syncs"] == 1


def test_workspaces_are_allocated_once_for_all_layers() -> None:
    case = Case()
    session, experts = new_session(case), make_experts(case)
    for _ in range(3):
        gradients(flat(session), experts, make_inputs(case, 0))
    assert session.pool.counters["allocations"] == 1


def test_a_delayed_lane_and_poisoned_buffers_change_no_bit() -> None:
    dice = random.Random(5)
    for routing in ("random", "95/1"):
        case = Case(routing=routing, dtype=torch.float32, tokens=(61,))
        calm = gradients(flat(new_session(case)), make_experts(case), make_inputs(case, 0))
        for _ in range(3):
            session = new_session(case, overlap=True, poison=True, delay=lambda: dice.random() * 3e-3)
            late = gradients(flat(session), make_experts(case), make_inputs(case, 0))
            session.pool.close()
            for name, value in calm.items():
                assert_bitwise(late[name], value, name)


def test_adds_choice_by_choice_give_the_bits_of_sequential_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's combine, run here: each add touches distinct tokens, so no atomics decide the order."""
    from steppe.flatteners.dispatch import paths

    case = Case(routing="same_twice", dtype=torch.float64, tokens=(61,))
    expected = gradients(flat(new_session(case)), make_experts(case), make_inputs(case, 0))
    calls: list[int] = []

    def add(self: paths.Source, token: torch.Tensor, rows: torch.Tensor) -> None:
        assert len(token.unique()) == len(token)
        calls.append(len(token))
        self.total.index_add_(0, token, rows)

    monkeypatch.setattr(paths, "_SEQUENTIAL_ADDS", ())
    monkeypatch.setattr(paths.Source, "_add", add)
    results = gradients(flat(new_session(case)), make_experts(case), make_inputs(case, 0))
    assert sum(calls) == 2 * 61 * case.choices
    for name in ("out", "tokens"):
        torch.testing.assert_close(results[name], expected[name])


def test_telemetry_says_what_was_planned_and_what_is_wrong_with_the_cap() -> None:
    case = Case(chunk_tokens=100)
    session = new_session(case)
    gradients(flat(session), make_experts(case), make_inputs(case, 0))
    layer = session.telemetry.read()
    assert (layer.forwards, layer.backwards, layer.chunks, layer.rows) == (1, 1, 1, 120)
    found = telemetry.diagnose({"layers": [layer], "num_ranks": 1, "ties_pinned": False})
    assert len(found) == 1
    assert "nothing is flattened; lower chunk_tokens" in found[0]
    layer.chunk_rows, layer.exchange_ms, layer.compute_ms, layer.flipped = 3, 20.0, 10.0, 2
    found = telemetry.diagnose({"layers": [layer], "num_ranks": 2, "ties_pinned": False})
    assert "raise chunk_tokens" in found[0]
    assert "2 recomputes chose other experts" in found[1]
