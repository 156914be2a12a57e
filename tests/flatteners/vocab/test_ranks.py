"""Parity on 1 to 4 gloo ranks: every option under every schedule, uneven and empty shares."""

from __future__ import annotations

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
    Spec(ignored=0.0),
    Spec(ignored=1.1),
    Spec(offset=3000.0, bias=True, want=("loss", "entropy"), options={"label_smoothing": 0.1}),
)


def schedules(spec: Spec, ranks: int) -> list[str]:
    at_once = [] if set(spec.want) - {"loss", "num_correct"} or spec.options.get("reduction") == "none" else ["one_pass"]
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
    for told in run_ranks(check_all, ranks, covering(ranks, ("float32",))):
        for result in told:
            assert result["passes"] in (0, 2, 3, 4)
