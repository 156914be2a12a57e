"""Parity on 1 to 4 gloo ranks: every option under every schedule, uneven and empty shares."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.flatteners.vocab.programs import ROW_VALUES, Spec, check_on_ranks

SHARES = {
    1: ((37,), (101,)),
    2: ((11, 26), (60, 41)),
    3: ((9, 0, 23), (40, 0, 61)),
    4: ((7, 12, 0, 3), (5, 0, 90, 6)),
}
SMALL = {1: ((13,), (29,)), 2: ((5, 8), (18, 11)), 3: ((4, 0, 9), (11, 0, 18)), 4: ((3, 6, 0, 4), (2, 0, 21, 6))}


def options(vocab: int) -> tuple[Spec, ...]:
    """Every option, alone and with others, over `vocab` rows."""
    return (
        Spec(),
        Spec(options={"reduction": "sum", "label_smoothing": 0.2}),
        Spec(options={"reduction": "none", "z_loss": 0.05}),
        Spec(options={"softcap": 3.0, "logit_scale": 0.6}, bias=True),
        Spec(class_weight=True, options={"label_smoothing": 0.1}),
        Spec(class_weight=True, bias=True, options={"reduction": "none", "vocab_size": vocab - 4, "softcap": 4.0}),
        Spec(options={"num_items_in_batch": 55.0, "ignore_index": 3}),
        Spec(want=("loss", "num_correct"), bias=True),
        Spec(
            want=("loss", "logprob", "entropy", "lse", "num_correct"), options={"softcap": 5.0, "vocab_size": vocab - 2}
        ),
        Spec(want=("entropy",), bias=True),
        Spec(frozen="hidden", bias=True),
        Spec(frozen="weight"),
        Spec(frozen="weight alone", bias=True),
        Spec(ignored=0.0),
        Spec(options={"vocab_size": 4, "label_smoothing": 0.1}, class_weight=True),  # later shards are all padding
        Spec(ignored=1.1),
        Spec(offset=3000.0, bias=True, want=("loss", "entropy"), options={"label_smoothing": 0.1}),
    )


def schedules(spec: Spec, ranks: int) -> list[str]:
    at_once = (
        [] if set(spec.want) - {"loss", "num_correct"} or spec.options.get("reduction") == "none" else ["one_pass"]
    )
    return [*at_once, "weights", *(["activations"] if ranks > 1 else []), "auto"]


def covering(ranks: int, dtype: str, shares: dict = SHARES, sizes: tuple[dict, ...] = (Spec().sizes,)) -> list[Spec]:
    rows, shards = shares[ranks]
    return [
        spec.but(rows=rows, shards=shards, dtype=dtype, schedule=schedule, seed=seed, sizes=size)
        for seed, spec in enumerate(options(sum(shards)))
        for schedule in schedules(spec, ranks)
        for size in sizes
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_option_under_every_schedule_equals_the_whole_program(ranks: int) -> None:
    """Also counts: 3 or 4 matrix passes, and the bytes of the wire's law (programs.check_laws)."""
    check_on_ranks(covering(ranks, "float32"), ranks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_are_no_worse_than_the_plain_program(dtype: str) -> None:
    check_on_ranks(covering(2, dtype)[::2], 2)


SIZES = (
    {},
    {"tile_tokens": 1, "tile_vocab": 1},
    {"tile_tokens": 4, "tile_vocab": 50, "num_chunks": 3},
    {"budget_bytes": 2048},
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["small", "wide"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_whole_grid_of_options_schedules_ranks_and_dtypes(shape: str, ranks: int, dtype: str) -> None:
    """Strips of one logit on the small shape, larger tiles on the wide one: no piece takes more than a minute."""
    shares, sizes = (SMALL, SIZES) if shape == "small" else (SHARES, (SIZES[0], *SIZES[2:]))
    check_on_ranks(covering(ranks, dtype, shares, sizes), ranks, timeout_s=120.0)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_options_over_drawn_ranks_equal_the_whole_program(data: st.DataObject) -> None:
    """Pairs and more of options together, over uneven and empty shares, with any tiles."""
    ranks = data.draw(st.integers(2, 4))
    shares = st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks).map(tuple)
    rows, shards = data.draw(shares), data.draw(shares.filter(any))
    drawn = data.draw(st.fixed_dictionaries({}, optional={
        "reduction": st.sampled_from(["mean", "sum", "none"]), "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.sampled_from([1e-4, 0.1]), "softcap": st.sampled_from([2.0, 30.0]),
        "logit_scale": st.sampled_from([0.25, -1.5]), "vocab_size": st.integers(1, sum(shards)),
        "ignore_index": st.sampled_from([-1, 0, 1000]),
    }))  # fmt: skip
    sizes = st.fixed_dictionaries({}, optional={
        "tile_tokens": st.integers(1, 9), "tile_vocab": st.integers(1, 9), "num_chunks": st.integers(1, 5),
    })  # fmt: skip
    want = st.lists(st.sampled_from(["loss", *ROW_VALUES, "num_correct"]), min_size=1, unique=True).map(tuple)
    spec = Spec(
        rows, shards, 5, data.draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"])), options=drawn,
        bias=data.draw(st.booleans()), class_weight=data.draw(st.booleans()), want=data.draw(want),
        frozen=data.draw(st.sampled_from(["", "hidden", "weight", "weight alone"])), seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    check_on_ranks([spec.but(schedule=s, sizes=data.draw(sizes)) for s in schedules(spec, ranks)], ranks)


def test_a_rank_whose_whole_shard_is_masked_has_no_part_in_entropies_and_gradients() -> None:
    specs = [
        Spec((5, 3, 4), (12, 9, 11), 5, schedule=schedule, bias=True, masked=15, want=want, options={"z_loss": 0.1})
        for schedule, want in (("one_pass", ("loss",)), *((s, ("loss", "entropy")) for s in ("weights", "activations")))
    ]
    check_on_ranks(specs, 3)


def test_chunks_of_a_ring_do_not_change_what_comes_out() -> None:
    specs = [
        Spec(*SHARES[3], schedule=schedule, bias=True, sizes=sizes)
        for schedule in ("one_pass", "weights", "activations")
        for sizes in SIZES
    ]
    check_on_ranks(specs, 3)


def empty_combinations() -> list[Spec]:
    return [
        Spec(rows=rows, shards=shards, schedule=schedule, width=4)
        for rows in product((0, 4), repeat=3)
        for shards in product((0, 5), repeat=3)
        for schedule in ("one_pass", "weights", "activations")
        if sum(shards)
    ]


def test_no_combination_of_empty_ranks_deadlocks_or_differs() -> None:
    check_on_ranks(empty_combinations(), 3)
