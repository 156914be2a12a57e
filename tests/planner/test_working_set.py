"""Refusal before step 1 with peak, missing bytes and a remedy that really fits; no more tokens than declared."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from steppe.core.errors import WorkingSetError
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, MachineShape, MeshShape, RunShape
from steppe.core.units import GiB, parse_tokens
from steppe.flatteners import NAMES
from steppe.planner.models import load_model
from steppe.planner.plan import Plan
from steppe.planner.predict import PLAIN, predict
from steppe.planner.search import candidate, policies_of
from steppe.planner.working_set import WorkingSet, cheapest_remedy, count_tokens

ALL_ON = {name: policies_of(name)[-1] for name in NAMES}
H200 = MachineShape(device_memory_bytes=141 * 10**9, host_memory_bytes=2 * 10**12)


def shape(name: str, seq_len: int, world: int, machine: MachineShape = H200, **mesh: int) -> RunShape:
    return RunShape(load_model(name), BatchShape(seq_len), MeshShape(world, **mesh), machine)


def test_what_fits_is_launched_with_its_prediction() -> None:
    run = shape("qwen3-30b-a3b", 16_384, 16)
    assert WorkingSet(run, PLAIN).launch().forecast.ledger == predict(run)


def test_what_cant_fit_is_refused_with_peak_bytes_and_the_cheapest_switch() -> None:
    run = shape("qwen3-30b-a3b", 131_072, 16)
    missing = candidate(run, PLAIN).device_missing
    with pytest.raises(WorkingSetError, match=r"vocab peak at loss.*too many.*Remedy: switch on vocab") as refusal:
        WorkingSet(run, PLAIN).launch()
    assert missing > 0
    assert WorkingSet(run, {**PLAIN, "vocab": ALL_ON["vocab"]}).launch().fits
    assert "GiB" in str(refusal.value)


def test_when_one_switch_is_not_enough_several_are_named() -> None:
    run = shape("paper-120b", 2**20, 16, sequence=16, expert=16, vocab=16)
    remedy = cheapest_remedy(candidate(run, PLAIN))
    assert remedy.startswith("switch on optimizer and vocab")


def test_when_no_switch_helps_the_length_that_fits_is_named_and_fits() -> None:
    run = shape("qwen3-4b", 2**20, 8, replace(H200, device_memory_bytes=24 * GiB), sequence=8)
    remedy = cheapest_remedy(candidate(run, ALL_ON))
    found = re.match(r"shorten seq_len to ([0-9,KM]+), or take more ranks", remedy)
    assert found, remedy
    shorter = replace(run, batch=BatchShape(parse_tokens(found.group(1))))
    assert candidate(shorter, ALL_ON).fits


def test_missing_host_memory_is_refused_too() -> None:
    run = shape(
        "paper-120b", 131_072, 16, replace(H200, host_memory_bytes=200 * 10**9), sequence=16, expert=16, vocab=16
    )
    with pytest.raises(WorkingSetError, match=r"host memory of a node, optimizer.*too many"):
        WorkingSet(run, ALL_ON).launch()


def test_a_plan_becomes_a_working_set_on_a_machine() -> None:
    run = shape("qwen3-30b-a3b", 16_384, 16, sequence=4)
    plan = Plan.of("qwen3-30b-a3b", run, PLAIN)
    elsewhere = shape("qwen3-30b-a3b", 1024, 1)
    assert WorkingSet.of(plan, elsewhere, H200).shape == run
    assert WorkingSet.of(plan, elsewhere, H200).tokens_per_rank == 4096


def test_more_tokens_than_declared_are_refused_and_fewer_are_not() -> None:
    working_set = WorkingSet(shape("qwen3-30b-a3b", 16_384, 16, sequence=4), PLAIN)
    working_set.admit(4096)
    working_set.admit(0)
    with pytest.raises(WorkingSetError, match=r"got 4,097; allowed: at most 4,096"):
        working_set.admit(4097)


def test_packed_documents_are_fine_while_their_total_stays_within_the_batch() -> None:
    working_set = WorkingSet(shape("qwen3-30b-a3b", 64, 16, sequence=4), PLAIN)
    loader = [{"input_ids": [[1] * 40, [2] * 24]}, {"input_ids": np.zeros((1, 64), np.int64)}, {"input_ids": [3] * 10}]
    assert working_set.check(loader) == 64
    with pytest.raises(WorkingSetError, match=r"tokens of batch 3.*got 65"):
        working_set.check([*loader, {"input_ids": [[0] * 65]}])


def test_lists_of_tensors_are_counted_whole_not_one_token_each() -> None:
    rows = [np.ones(5), np.ones(3)]
    assert count_tokens(rows) == count_tokens({"input_ids": rows}) == 8
    assert count_tokens({"input_ids": [np.ones((2, 4)), np.ones((1, 4))]}) == 12
    assert count_tokens(({"input_ids": np.ones((2, 4))},)) == 8
    assert count_tokens([np.int64(7), np.int64(8)]) == 2


def test_only_the_first_batches_are_looked_at() -> None:
    working_set = WorkingSet(shape("qwen3-30b-a3b", 64, 16), PLAIN)
    too_long = {"input_ids": [0] * 65}
    assert working_set.check([{"input_ids": [0]}] * 2 + [too_long], batches=2) == 1


def test_a_batch_without_tokens_to_count_is_refused() -> None:
    assert count_tokens([[1, 2], [3]]) == 3
    with pytest.raises(WorkingSetError, match="2 tensors without names"):
        count_tokens((np.ones((1, 4)), np.ones((1, 4))))
    with pytest.raises(WorkingSetError, match="input_ids"):
        count_tokens(iter([1, 2]))
    with pytest.raises(WorkingSetError, match="input_ids"):
        count_tokens({"text": "hello"})


def test_deviations_beyond_five_percent_are_told_after_steps_one_and_three() -> None:
    run = shape("qwen3-30b-a3b", 16_384, 16)
    working_set, predicted = WorkingSet(run, PLAIN), predict(run)
    assert not list(working_set.deviations(predicted, 3))
    off = replace(predicted, device_peak_bytes=predicted.device_peak_bytes * 107 // 100)
    (told,) = working_set.deviations(off, 3)
    assert "device peak" in told
    assert "+7%" in told
    assert not list(working_set.deviations(off, 2))
    peaks = {**predicted.peaks, "vocab": predicted.peaks["vocab"] * 9 // 10}
    (told,) = working_set.deviations(replace(predicted, peaks=peaks), 3)
    assert told.startswith("vocab peak")
    assert list(working_set.deviations(replace(predicted, device_peak_bytes=1), 1))


def test_off_is_the_only_thing_a_remedy_switches_on() -> None:
    run = shape("qwen3-30b-a3b", 131_072, 16)
    assert all(policy is OFF for policy in PLAIN.values())
    assert "switch" not in cheapest_remedy(candidate(replace(run, batch=BatchShape(2**24)), ALL_ON))
