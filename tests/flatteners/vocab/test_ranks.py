"""Parity on 1 to 4 gloo ranks: every option under every schedule, uneven and empty shares."""

from __future__ import annotations

from itertools import product

import pytest

from tests.flatteners.vocab.programs import Spec, check_all
from tests.support.ranks import run_ranks

SHARES = {
    1: ((37,), (101,)),
    2: ((11, 26), (60, 41)),
    3: ((9, 0, 23), (40, 0, 61)),
    4: ((7, 12, 0, 3), (5, 0, 90, 6)),
}
OPTIONS = (
    Spec(),
    Spec(options={"reduction": "sum", "label_smoothing": 0.2}),
    Spec(options={"reduction": "none", "z_loss": 0.05}),
    Spec(options={"softcap": 3.0, "logit_scale": 0.6}, bias=True),
    Spec(class_weight=True, options={"label_smoothing": 0.1}),
    Spec(class_weight=True, bias=True, options={"reduction": "none", "vocab_size": 97, "softcap": 4.0}),
    Spec(options={"num_items_in_batch": 55.0, "ignore_index": 3}),
    Spec(want=("loss", "num_correct"), bias=True),
    Spec(want=("loss", "logprob", "entropy", "lse", "num_correct"), options={"softcap": 5.0, "vocab_size": 99}),
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


def covering(ranks: int, dtypes: tuple[str, ...]) -> list[Spec]:
    rows, shards = SHARES[ranks]
    return [
        spec.but(rows=rows, shards=shards, dtype=dtype, schedule=schedule, seed=seed)
        for seed, spec in enumerate(OPTIONS)
        for dtype in dtypes
        for schedule in schedules(spec, ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_option_under_every_schedule_equals_the_whole_program(ranks: int) -> None:
    """Also counts: 3 or 4 matrix passes, and the bytes of the wire's law (programs.check_laws)."""
    run_ranks(check_all, ranks, covering(ranks, ("float32",)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_are_no_worse_than_the_plain_program(dtype: str) -> None:
    run_ranks(check_all, 2, covering(2, (dtype,))[::2])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_whole_grid_of_options_schedules_ranks_and_dtypes(ranks: int, dtype: str) -> None:
    specs = [spec.but(sizes=sizes) for spec in covering(ranks, (dtype,)) for sizes in SIZES]
    run_ranks(check_all, ranks, specs, timeout_s=240.0)


SIZES = (
    {},
    {"tile_tokens": 1, "tile_vocab": 1},
    {"tile_tokens": 4, "tile_vocab": 50, "num_chunks": 3},
    {"budget_bytes": 2048},
)


def test_chunks_of_a_ring_do_not_change_what_comes_out() -> None:
    specs = [
        Spec(*SHARES[3], schedule=schedule, bias=True, sizes=sizes)
        for schedule in ("one_pass", "weights", "activations")
        for sizes in SIZES
    ]
    run_ranks(check_all, 3, specs)


def empty_combinations() -> list[Spec]:
    return [
        Spec(rows=rows, shards=shards, schedule=schedule, width=4)
        for rows in product((0, 4), repeat=3)
        for shards in product((0, 5), repeat=3)
        for schedule in ("one_pass", "weights", "activations")
        if sum(shards)
    ]


def test_no_combination_of_empty_ranks_deadlocks_or_differs() -> None:
    run_ranks(check_all, 3, empty_combinations())
