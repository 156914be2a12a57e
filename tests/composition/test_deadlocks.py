"""No configuration hangs: random groups, subsets, routes, lengths and delays, each within its time."""

from __future__ import annotations

import math

import pytest

from tests.composition.deadlocks import hunt, run
from tests.support.ranks import run_ranks

QUICK, ALL = 20, 200
TIMEOUT_S = 15.0


def finishes(seed: int) -> None:
    spec = hunt(seed)
    losses = run_ranks(run, spec.mesh.world, seed, timeout_s=TIMEOUT_S)
    assert len(set(losses)) == 1, f"{spec}: ranks disagree: {losses}"
    assert math.isfinite(losses[0]), str(spec)


def test_the_seeds_draw_what_is_hunted() -> None:
    specs = [hunt(seed) for seed in range(QUICK)]
    assert {spec.skew for spec in specs} == {"even", "one", "apart"}
    assert any(len(set(lengths)) > 1 for spec in specs for lengths in spec.lengths), "ranks of different lengths"
    assert any(any(step) and not all(step) for spec in specs for step in spec.labelled), "a rank without labels"
    assert any(not any(step) for spec in specs for step in spec.labelled), "no labels anywhere"
    assert any(spec.delay_s and len(spec.names) == 4 for spec in specs)
    assert any(spec.mesh.sequence > 1 and spec.mesh.expert > 1 and spec.mesh.vocab > 1 for spec in specs)


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_random_configuration_finishes(seed: int) -> None:
    finishes(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_the_whole_hunt(seed: int) -> None:
    finishes(seed)
