"""Several gloo ranks against one dense process: many cases a launch; errors that all ranks raise alike."""

from __future__ import annotations

import pytest
import torch

from steppe.flatteners.dispatch.reference import dense_loop
from tests.flatteners.dispatch import on_ranks
from tests.flatteners.dispatch.cases import FORMS, ROUTINGS, Case, assert_like_dense, whole
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.ranks import run_ranks

TOKENS = {2: (40, 33), 4: (37, 0, 64, 5)}


def check(ranks: int, cases: list[tuple[Case, bool]], hazards: bool = False) -> list[list[dict]]:
    """Run the cases on one launch and hold each against the dense loop; results are [case][rank]."""
    by_rank = run_ranks(on_ranks.run_cases, ranks, cases, hazards)
    by_case = [list(results) for results in zip(*by_rank, strict=True)]
    for (case, again), results in zip(cases, by_case, strict=True):
        assert_like_dense(case, results, "checkpointed" if again else "")
    return by_case


def covering(ranks: int) -> list[tuple[Case, bool]]:
    """Every routing, form, dtype and both checkpoint settings at least twice, not their product."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    routings = (*ROUTINGS, "first_rank")
    return [
        (Case(FORMS[i % 2], routing, dtypes[i % 3], TOKENS[ranks], chunk_tokens=7 + 6 * (i % 2)), i % 4 < 2)
        for i, routing in enumerate(routings * 2)
    ]


@pytest.mark.parametrize("ranks", TOKENS)
def test_ranks_together_equal_the_dense_loop(ranks: int) -> None:
    check(ranks, covering(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_tokens", [7, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_whole_grid_equals_the_dense_loop(ranks: int, dtype: torch.dtype, chunk_tokens: int) -> None:
    """Every form and routing, checkpointed and not; 3 ranks are a group that divides 12 experts only."""
    tokens = {1: (61,), 3: (37, 0, 64), **TOKENS}[ranks]
    cases = [
        Case(form, routing, dtype, tokens, experts=12 if ranks == 3 else 8, chunk_tokens=chunk_tokens)
        for form in (*FORMS, "biased")
        for routing in (*ROUTINGS, "first_rank")
    ]
    check(ranks, [(case, again) for case in cases for again in (False, True)])


def test_ranks_without_tokens_and_more_choices_than_natives_are_exact() -> None:
    few = Case(tokens=(0, 0, 9, 0), experts=4, choices=4, routing="same_twice")
    none = Case(tokens=(0, 0, 0, 0))
    check(4, [(few, False), (few, True), (none, True), (Case(tokens=(1, 1, 1, 1), routing="95/1"), False)])


def test_tight_caps_minimum_rows_and_one_full_rank_are_exact() -> None:
    tight = {"max_load": 1.0, "switch_ratio": 1.0}
    cases = [
        Case(tokens=(0, 0, 0, 90), routing="95/1", **tight),
        Case(tokens=(90, 1, 0, 1), routing="first_rank", experts=32, **tight),
        Case(tokens=TOKENS[4], routing="95/4", min_rows=9, **tight),
        Case("gpt_oss", tokens=(0, 0, 0, 90), routing="all_to_one", chunk_tokens=1, spill_slots=4, **tight),
        Case(tokens=(5, 6, 7, 8), routing="random", chunk_tokens=500, **tight),
    ]
    check(4, [(case, index % 2 == 0) for index, case in enumerate(cases)], hazards=True)


@pytest.mark.parametrize(("ranks", "hot"), [(4, 24), pytest.param(8, 48, marks=pytest.mark.slow)])
def test_equally_hot_experts_of_one_rank_pass_through_two_slots_and_home_once(ranks: int, hot: int) -> None:
    shape = {"tokens": (30,) * ranks, "experts": hot * ranks, "choices": 4, "routing": "first_rank", "chunk_tokens": 4}
    case, wide = Case(**shape), Case(**shape, spill_slots=4)
    for setting, results in zip((case, wide), check(ranks, [(case, False), (wide, True)])):
        counters = [r["counters"] for r in results]
        transfers = results[0]["stats"]["transfers"]
        assert max(r["stats"]["foreign"] for r in results) > setting.spill_slots
        assert sum(c.get("weights_sent", 0) for c in counters) == 2 * transfers  # forward and backward
        assert sum(c.get("gradients_sent", 0) for c in counters) == transfers
        assert max(c.get("most_foreign_alive", 0) for c in counters) <= setting.spill_slots


def test_poisoned_buffers_and_random_delays_change_no_bit() -> None:
    cases = [
        (Case(routing=r, dtype=torch.float32, tokens=TOKENS[4], experts=32), c)
        for r, c in (("first_rank", True), ("95/4", False), ("random", True))
    ]
    calm = run_ranks(on_ranks.run_cases, 4, cases, False)
    delayed = run_ranks(on_ranks.run_cases, 4, cases, True)
    for quiet_rank, late_rank in zip(calm, delayed):
        for quiet, late in zip(quiet_rank, late_rank):
            for name in quiet.keys() - {"counters", "stats"}:
                assert_bitwise(late[name], quiet[name], name)


def test_the_baselines_over_ranks_agree_with_the_dense_loop() -> None:
    for routing in ("random", "95/1"):
        case = Case(routing=routing, tokens=TOKENS[2])
        truth = whole(case, dense_loop)
        results = run_ranks(on_ranks.run_baselines, 2, case)
        for program in results[0]:
            for name, expected in truth.items():
                ours = torch.cat([r[program][name] for r in results])
                assert_reordered(ours, expected, expected, length=case.longest_sum, what=f"{program} {name}")


def test_bad_input_on_one_rank_is_refused_on_all_of_them() -> None:
    for kind, words in (
        ("ids", "expert ids: got 1 on rank 1 bad ones"),
        ("weights", "3 on rank 1 bad ones"),
        ("tokens", "tokens on one rank: got 40; allowed: at most 39"),
        ("experts", "E 15 over E_p 2"),
    ):
        for told in run_ranks(on_ranks.refused, 2, kind):
            assert words in told, (kind, told)


def test_a_rank_that_never_comes_ends_in_a_time_out_that_names_layer_chunk_and_peers() -> None:
    told = run_ranks(on_ranks.late_rank, 2, timeout_s=60.0)
    assert "blocks.3.experts, forward, dispatch of chunk 0" in told[0]
    assert "peers of rank 0: [1]" in told[0]
