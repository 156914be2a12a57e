"""The chosen plan: why each switch stands, what more memory does, and the published end-to-end rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.errors import ConfigError
from steppe.core.shapes import BatchShape, Dtypes, MachineShape
from steppe.core.units import GiB
from steppe.flatteners import DECISION_ORDER, NAMES
from steppe.planner.advice import predicted_without
from steppe.planner.answer import answer
from steppe.planner.context import max_context, max_context_plain, top_peak
from steppe.planner.layouts import Job, layouts
from steppe.planner.models import load_model
from steppe.planner.search import candidate, search, search_plain, switches, verdicts

H200 = MachineShape(
    device_memory_bytes=141 * 10**9, host_memory_bytes=2 * 10**12, host_memory_rate=300e9, adamw_rate=300e9 / 28
)
PAPER = {"paper-120b": 16, "paper-241b": 32, "paper-667b": 64}
MILLION = 2**20


def job(name: str, world: int, seq_len: int = MILLION, **changes: object) -> Job:
    return Job(load_model(name), BatchShape(seq_len), world, machine=H200, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "world"), PAPER.items())
def test_flattened_reaches_a_million_tokens_where_the_paper_does(name: str, world: int) -> None:
    assert search(job(name, world)).fits
    assert max_context(job(name, world)).num_tokens >= MILLION
    assert not search_plain(job(name, world)).fits


def test_plain_on_the_published_layout_stops_near_128k_by_its_logits() -> None:
    """E_p 16, D 16, no offload, float32 masters on the device: the published run stops at 128K. AdamW is fused there,
    or its foreach transient alone would not fit."""
    published = job(
        "paper-120b", 16, expert=16, sequence=16, vocab=16, without=frozenset({"foreach transient"}),
        dtypes=Dtypes("float32", "float32", "float32", "bfloat16"),
    )  # fmt: skip
    longest = max_context_plain(published)
    assert 64 * 1024 <= longest.num_tokens <= 256 * 1024
    beyond = published.with_seq_len(longest.num_tokens + 16 * 1024).shape(16, 16, 16)
    seen = candidate(beyond, {}, published.without)
    ledger = seen.forecast.ledger
    assert seen.device_missing
    assert max(("dispatch", "vocab", "boundary"), key=lambda owner: ledger.peaks[owner]) == "vocab"
    assert predicted_without(ledger)(["vocab"]) <= H200.device_memory_bytes  # the logits gone, it fits


@pytest.mark.parametrize(("name", "world"), PAPER.items())
@pytest.mark.parametrize("seq_len", [32 * 1024, 128 * 1024, 512 * 1024, MILLION])
def test_flattened_has_headroom_wherever_plain_fits(name: str, world: int, seq_len: int) -> None:
    asked = job(name, world, seq_len)
    plain, flat = search_plain(asked), search(asked)
    assert flat.fits
    if plain.fits:
        assert flat.time.seconds <= plain.time.seconds


def test_every_switch_has_a_sentence_with_numbers_in_the_methods_order() -> None:
    asked = job("paper-120b", 16)
    told = switches(asked, search(asked))
    assert [switch.flattener for switch in told] == list(DECISION_ORDER)
    assert all(any(c.isdigit() for c in switch.why) for switch in told)
    assert {switch.flattener for switch in told if switch.on} >= {"optimizer", "vocab"}


def test_a_small_vocabulary_keeps_its_plain_head_unless_forced() -> None:
    asked = job("mixtral-8x7b", 8, 128 * 1024)
    assert not verdicts(next(layouts(asked)), pressed=True)["vocab"].on
    forced = search(replace(asked, forced=(("vocab", True),)))
    assert forced.policies["vocab"] != search(asked).policies["vocab"]


def test_a_middling_vocabulary_keeps_its_plain_head_until_a_measurement_says_otherwise() -> None:
    asked = job("olmoe-1b-7b", 8, 512 * 1024)
    told = {s.flattener: s for s in switches(asked, search(asked))}
    assert not told["vocab"].on
    assert "steppe compare" in told["vocab"].why
    assert search(replace(asked, forced=(("vocab", True),))).num_on >= 1


def test_a_slow_link_keeps_the_boundaries_on_the_device_unless_forced() -> None:
    slow = replace(H200, to_host_rate=4e9, to_device_rate=4e9)
    asked = replace(job("qwen3-30b-a3b", 16), machine=slow)
    told = {s.flattener: s for s in switches(asked, search(asked))}
    assert not told["boundary"].on
    assert "4.0 GB/s" in told["boundary"].why


def test_what_fits_plainly_is_left_plain_where_nothing_gets_faster() -> None:
    asked = job("qwen3-0.6b", 8, 8192)
    assert search(asked).num_on == 0
    assert all("not needed" in s.why or not s.on for s in switches(asked, search(asked)))


def test_forced_flatteners_are_on_or_off_whatever_pays() -> None:
    asked = job("paper-120b", 16, 128 * 1024, forced=(("boundary", True), ("vocab", False)))
    told = {s.flattener: s for s in switches(asked, search(asked))}
    assert told["boundary"].on
    assert not told["vocab"].on
    assert "asked for" in told["boundary"].why


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["olmoe-1b-7b", "qwen3-30b-a3b", "llama-3.1-8b", "gpt-oss-20b"]),
    world=st.sampled_from([2, 8, 16]),
    seq_len=st.sampled_from([16_384, 131_072, 524_288]),
    gib=st.integers(8, 120),
    more=st.integers(1, 80),
)
def test_more_memory_never_gives_a_slower_plan_or_a_shorter_context(
    name: str, world: int, seq_len: int, gib: int, more: int
) -> None:
    small, large = (
        Job(load_model(name), BatchShape(seq_len), world, machine=replace(H200, device_memory_bytes=size * GiB))
        for size in (gib, gib + more)
    )
    before, after = search(small), search(large)
    if before.fits:
        assert after.fits
        assert after.time.seconds <= before.time.seconds
    assert max_context(large).num_tokens >= max_context(small).num_tokens
    assert max_context_plain(large).num_tokens >= max_context_plain(small).num_tokens


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["olmoe-1b-7b", "qwen3-30b-a3b", "paper-120b"]),
    world=st.sampled_from([8, 16]),
    seq_len=st.sampled_from([16_384, 131_072]),
    host=st.integers(0, 2000),
    more=st.integers(1, 2000),
)
def test_more_host_memory_never_gives_a_slower_plan(name: str, world: int, seq_len: int, host: int, more: int) -> None:
    small, large = (
        Job(load_model(name), BatchShape(seq_len), world, machine=replace(H200, host_memory_bytes=size * 10**9))
        for size in (host, host + more)
    )
    before, after = search(small), search(large)
    if before.fits:
        assert after.fits
        assert after.time.seconds <= before.time.seconds


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "paper-120b", "llama-3.1-8b"])
@pytest.mark.parametrize("plain", [True, False])
def test_the_longest_context_is_the_last_step_that_fits(name: str, plain: bool) -> None:
    asked = job(name, 16)
    longest = (max_context_plain if plain else max_context)(asked)
    find = search_plain if plain else search
    if longest.num_tokens:
        assert find(asked.with_seq_len(longest.num_tokens)).fits
        assert longest.stopped_by
        assert longest.missing_bytes > 0


def test_when_nothing_helps_the_ceiling_and_the_smallest_job_are_named() -> None:
    tiny = replace(job("qwen3-32b", 8), machine=replace(H200, device_memory_bytes=24 * GiB))
    told = answer("qwen3-32b", tiny)
    assert not told.flattened.chosen.fits
    text = "\n".join(told.sentences)
    assert "batch x seqlen: 1 x 1M over D 8 is N 131,072; the working-set ceiling" in text
    assert "smallest W that works" in text


def test_weights_that_dont_fit_are_refused_with_the_smallest_number_of_ranks() -> None:
    message = r"weights: got 156\.24 GiB a rank.*that holds the weights is 10; the smallest W that works.*: 64"
    with pytest.raises(ConfigError, match=message):
        answer("deepseek-v3", job("deepseek-v3", 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert": 3}, r"group size E_p: got 3; allowed: a divisor of W 16 and E 128"),
        ({"expert": 32}, r"group size E_p: got 32; allowed"),
        ({"sequence": 5}, r"group size D: got 5; allowed: a divisor of W 16 and heads 32"),
        ({"vocab": 7}, r"group size P: got 7; allowed: a divisor of W 16"),
    ],
)
def test_impossible_groups_are_refused_with_what_is_allowed(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(job("qwen3-30b-a3b", 16, **changes))


def test_every_layout_divides_what_it_must() -> None:
    model = load_model("qwen3-30b-a3b")
    for shape in layouts(job("qwen3-30b-a3b", 24)):
        mesh = shape.mesh
        assert mesh.world % mesh.sequence == mesh.world % mesh.expert == mesh.world % mesh.vocab == 0
        assert model.num_heads % mesh.sequence == model.num_experts % mesh.expert == 0


def test_the_peak_that_is_named_is_one_of_the_four_when_they_hold_half() -> None:
    asked = job("paper-120b", 16)
    assert top_peak(search_plain(asked)) in NAMES
