"""The integer half: guarantees of the plan, the chunks and the tables, over random and adversarial counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.errors import ConfigError
from steppe.flatteners.dispatch.plan import Plan, plan_experts
from steppe.flatteners.dispatch.profiles import forced_counts, forced_routes
from steppe.flatteners.dispatch.schedule import Layout, choice_sizes, lay_out, receive_tables, send_tables

SEEDS = st.integers(0, 2**32 - 1)
KINDS = ("uniform", "one_hot", "few_hot", "sparse", "empty_ranks", "zipf", "nothing", "last_ranks", "equal_hot")


def adversarial_counts(kind: str, ranks: int, experts: int, rows: int, seed: int) -> np.ndarray:
    """Counts [E_p, E] of one kind of trouble."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, max(2, rows // experts), (ranks, experts))
    if kind == "one_hot":
        counts[:, rng.integers(experts)] += rows
    elif kind == "few_hot":
        counts[:, rng.integers(0, experts, 4)] += rng.integers(1, rows + 1, (ranks, 4))
    elif kind == "sparse":
        counts *= rng.random((ranks, experts)) < 0.1
    elif kind == "empty_ranks":
        counts *= (rng.random(ranks) < 0.5)[:, None]
    elif kind == "zipf":
        counts = np.minimum(rng.zipf(1.3, (ranks, experts)), rows)
    elif kind == "nothing":
        counts[:] = 0
    elif kind == "last_ranks":
        counts[: ranks - 1] = 0
        counts[-1, : max(1, experts // ranks)] += rows
    elif kind == "equal_hot":
        counts[:] = 0
        counts[:, : experts // ranks] = max(1, rows // experts)
    return counts.astype(np.int64)


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 64, max_experts: int = 512) -> tuple[np.ndarray, dict[str, float], int]:
    ranks = draw(st.integers(1, max_ranks))
    experts = ranks * draw(st.integers(1, max(1, max_experts // ranks)))
    rows = draw(st.sampled_from([1, 7, 100, 5_000, 70_000]))
    counts = adversarial_counts(draw(st.sampled_from(KINDS)), ranks, experts, rows, draw(SEEDS))
    options = {
        "max_load": draw(st.sampled_from([1.0, 1.1, 1.5])),
        "switch_ratio": draw(st.sampled_from([1.0, 1.3])),
        "min_rows": draw(st.sampled_from([0, 1, 64, 1024])),
    }
    return counts, options, draw(st.sampled_from([2, 4, 6]))


def check_plan(counts: np.ndarray, plan: Plan, options: dict[str, float]) -> None:
    """Every route once, loads under the cap, no pair twice, natives at home in their slots."""
    per_expert, total, ranks = counts.sum(0), int(counts.sum()), counts.shape[0]
    for expert in np.unique(np.append(plan.expert[plan.owner != plan.dest], 0)):
        mine = plan.expert == expert
        edges = sorted(zip(plan.start[mine].tolist(), plan.stop[mine].tolist()))
        assert edges[0][0] == 0
        assert edges[-1][1] == per_expert[expert]
        assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert (plan.stop - plan.start).sum() == total
    assert (np.bincount(plan.expert, plan.stop - plan.start, len(per_expert)) == per_expert).all()
    native = per_expert.reshape(ranks, -1).sum(1)
    if plan.num_transfers:
        assert plan.cap == -int(-options["max_load"] * total // ranks) + options["min_rows"]
    else:
        spilling = ranks > 1 and native.max() * ranks >= options["switch_ratio"] * total
        highest = -int(-options["max_load"] * total // ranks) + options["min_rows"]
        assert native.max() <= highest or not spilling
    assert plan.loads().max() <= plan.cap
    pairs = plan.dest * plan.num_experts + plan.expert
    assert len(np.unique(pairs)) == len(pairs)
    moved = plan.owner != plan.dest
    assert ((plan.stop - plan.start)[moved] > 0).all()
    assert (plan.expert[~moved] == np.arange(plan.num_experts)).all()


def check_layout(counts: np.ndarray, layout: Layout, slots: int) -> None:
    """The row bound both ways, chunk ranges that tile, never more foreign experts alive than slots."""
    ranks = counts.shape[0]
    stop = layout.first_chunk + layout.num_chunks
    place = np.clip(np.arange(layout.chunks + 1)[:, None] - layout.first_chunk, 0, layout.num_chunks)
    edges = layout.run_rows[None] * place[:, None, :] // np.maximum(layout.num_chunks, 1)
    rows = np.diff(edges, axis=0)  # [n, source, run]
    assert rows.sum() == counts.sum()
    assert rows.sum(2).max() <= layout.row_bound  # what a source sends in a chunk
    starts = np.searchsorted(layout.run_dest, np.arange(ranks))
    assert np.add.reduceat(rows.sum(1), starts, axis=1).max() <= layout.row_bound
    assert (np.add.reduceat(layout.num_chunks, starts) == layout.chunks).all()
    assert (layout.first_chunk[1:] == np.where(np.diff(layout.run_dest) > 0, 0, stop[:-1])).all()
    foreign = layout.plan.owner != layout.plan.dest
    held = np.bincount(layout.run[foreign], minlength=len(layout.run_dest))
    alive = held + np.where(np.diff(np.append(layout.run_dest, -1)) == 0, np.append(held[1:], 0), 0)
    assert alive.max() <= slots


@settings(max_examples=250, deadline=None)
@given(cases())
def test_every_route_is_placed_once_under_the_caps(case: tuple) -> None:
    counts, options, slots = case
    plan = plan_experts(counts, **options)
    check_plan(counts, plan, options)
    for chunk_rows in (max(1, int(counts.sum()) // (counts.shape[0] * 5)), 70_001):
        check_layout(counts, lay_out(counts, plan, chunk_rows=chunk_rows, spill_slots=slots), slots)


@pytest.mark.slow
@settings(max_examples=2500, deadline=None)
@given(cases())
def test_every_route_is_placed_once_under_the_caps_in_many_cases(case: tuple) -> None:
    test_every_route_is_placed_once_under_the_caps.hypothesis.inner_test(case)


@settings(max_examples=60, deadline=None)
@given(cases(max_ranks=6, max_experts=24))
def test_the_tables_of_all_ranks_describe_one_exchange(case: tuple) -> None:
    """Sends and receives agree, every route leaves once, and grouping puts each route at its expert."""
    counts, options, slots = case
    counts = np.minimum(counts, 40)
    ranks, experts = counts.shape
    layout = lay_out(counts, plan_experts(counts, **options), chunk_rows=17, spill_slots=slots)
    sends = [send_tables(layout, r) for r in range(ranks)]
    receives = [receive_tables(layout, r) for r in range(ranks)]
    routes = [np.repeat(np.arange(experts), counts[r]) for r in range(ranks)]  # expert of each route, in order
    left = [np.zeros(len(mine), int) for mine in routes]
    for chunk in range(layout.chunks):
        packed = []
        for r in range(ranks):
            picked = np.concatenate([np.arange(a, a + n) for a, n in sends[r].runs[chunk]] or [np.zeros(0, int)])
            left[r][picked] += 1
            packed.append(np.split(routes[r][picked], np.cumsum(sends[r].splits[chunk])[:-1]))
        for d in range(ranks):
            assert [len(packed[r][d]) for r in range(ranks)] == receives[d].splits[chunk]
            arrivals = np.concatenate([packed[r][d] for r in range(ranks)])
            grouped = np.concatenate([arrivals[a : a + n] for a, n in receives[d].gather[chunk]] or [arrivals[:0]])
            assert _experts_in_order(receives[d], layout, d, chunk) == grouped.tolist()
            order = np.concatenate([grouped[a : a + n] for a, n in receives[d].scatter[chunk]] or [arrivals[:0]])
            assert (order == arrivals).all()
    assert all((mine == 1).all() for mine in left)


def _experts_in_order(table, layout: Layout, rank: int, chunk: int) -> list[int]:
    group, native = table.group[chunk], layout.plan.num_native
    ids: list[int] = []
    for place, start, stop in table.experts[chunk]:
        assert start == len(ids)
        ids += [table.foreign[group][place] if group else rank * native + place] * (stop - start)
    return ids


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_rows_of_each_choice_follow_from_the_own_counts(seed: int, choices: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 6, (23, choices))
    by_choice = np.stack([np.bincount(ids[:, c], minlength=6) for c in range(choices)], 1)
    counts = np.stack([by_choice.sum(1), rng.integers(0, 9, 6)])
    layout = lay_out(counts, plan_experts(counts, switch_ratio=1.0), chunk_rows=7)
    sends = send_tables(layout, 0)
    choice = np.argsort(ids.T.reshape(-1), kind="stable") // 23
    for chunk, sizes in enumerate(choice_sizes(by_choice, layout, 0, sends)):
        picked = [choice[a : a + n] for a, n in sends.runs[chunk]]
        assert sizes == np.bincount(np.concatenate([choice[:0], *picked]), minlength=choices).tolist()


def test_the_row_bound_holds_for_300_adversarial_counts() -> None:
    for seed in range(310):
        ranks = (2, 4, 8, 16)[seed % 4]
        counts = adversarial_counts(KINDS[seed % len(KINDS)], ranks, ranks * (1 + seed % 7), 3_000, seed)
        check_layout(counts, lay_out(counts, plan_experts(counts), chunk_rows=400), 2)


def test_48_equally_hot_experts_on_one_rank_of_8_pass_through_two_slots() -> None:
    counts = np.zeros((8, 8 * 48), np.int64)
    counts[:, :48] = 100
    plan = plan_experts(counts)
    most = np.bincount(plan.dest[plan.owner != plan.dest]).max()
    assert most == 6
    check_layout(counts, lay_out(counts, plan, chunk_rows=400), 2)


# LLEP's own planner: weight transfers and most foreign experts on one rank (docs/dispatch.md names the source).
LLEP = {
    (128, 8, 1.0): [(11, 3), (12, 3), (13, 4), (13, 4), (10, 3), (10, 3), (7, 1)],
    (128, 8, 1.1): [(6, 1), (6, 1), (7, 1), (7, 1), (7, 1), (7, 1), (7, 1)],
    (384, 8, 1.0): [(13, 4), (13, 4), (13, 4), (13, 4), (10, 3), (10, 3), (7, 1)],
    (384, 8, 1.1): [(6, 1), (7, 1), (7, 1), (7, 1), (7, 1), (7, 1), (7, 1)],
    (256, 32, 1.0): [(38, 3), (38, 3), (38, 3), (38, 3), (34, 2), (34, 2), (31, 1)],
    (256, 32, 1.1): [(27, 1), (29, 1), (31, 1), (31, 1), (26, 1), (27, 1), (28, 1)],
    (384, 64, 1.0): [(69, 2), (69, 2), (69, 2), (69, 2), (66, 2), (66, 2), (63, 1)],
    (384, 64, 1.1): [(49, 1), (54, 1), (60, 2), (62, 1), (50, 1), (54, 1), (57, 1)],
}
SKEWED = ("30/16", "50/16", "80/16", "95/16", "30/4", "50/4", "95/1")


def test_no_profile_needs_more_transfers_than_lleps_planner() -> None:
    ours = theirs = 0
    for (experts, ranks, max_load), row in LLEP.items():
        for profile, (transfers, foreign) in zip(SKEWED, row, strict=True):
            counts = forced_counts(profile, num_ranks=ranks, num_tokens=65_536, num_experts=experts, num_choices=8)
            plan = plan_experts(counts, max_load=max_load)
            most = int(np.bincount(plan.dest[plan.owner != plan.dest]).max())
            case = f"{experts} experts, {ranks} ranks, {profile}, {max_load}"
            assert plan.loads().max() <= -int(-max_load * counts.sum() // ranks), case
            assert plan.num_transfers <= transfers, case
            assert most <= foreign, case
            ours, theirs = ours + plan.num_transfers, theirs + transfers
    assert ours < theirs


def test_helpers_on_the_owners_node_come_first() -> None:
    counts = forced_counts("50/4", num_ranks=8, num_tokens=1024, num_experts=64, num_choices=8)
    plan = plan_experts(counts, max_load=1.1, ranks_per_node=4)
    moved = plan.owner != plan.dest
    helpers = plan.dest[moved]
    assert {1, 2, 3} <= set(helpers.tolist())
    near = (plan.stop - plan.start)[moved][helpers < 4].sum()
    far = plan_experts(counts, max_load=1.1)
    away = far.owner != far.dest
    assert near >= (far.stop - far.start)[away][far.dest[away] < 4].sum()
    full = plan.loads()[1:4]
    assert (full == plan.cap).all()


def test_below_the_switch_ratio_every_expert_stays_home() -> None:
    counts = forced_counts("balanced", num_ranks=8, num_tokens=4096, num_experts=64, num_choices=8)
    assert plan_experts(counts).num_transfers == 0


def test_equal_counts_give_equal_plans() -> None:
    counts = adversarial_counts("few_hot", 16, 128, 4_000, 1)
    first, second = plan_experts(counts), plan_experts(counts.copy())
    assert all((getattr(first, f) == getattr(second, f)).all() for f in ("expert", "dest", "start", "stop"))


def test_experts_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="E 10 over E_p 4"):
        plan_experts(np.ones((4, 10), np.int64))


def test_a_profile_that_is_none_is_refused() -> None:
    for profile in ("95", "95/0", "95/8", "hot/1", "101/1"):
        with pytest.raises(ConfigError):
            forced_routes(profile, num_tokens=4, num_experts=8, num_choices=2)


def test_the_one_hot_profile_names_one_expert_several_times_in_a_token() -> None:
    ids = forced_routes("95/1", num_tokens=20, num_experts=8, num_choices=3)
    assert (ids[:19] == 0).all()
    assert (ids[19] > 0).all()
