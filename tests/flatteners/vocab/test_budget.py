"""The ledger entries of the vocabulary peak, and when the ring pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.errors import ConfigError
from steppe.core.ledger import BLOCK_BACKWARD, Moment
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import GiB, MiB
from steppe.flatteners.vocab.budget import VocabPolicy, entries, pays

MODEL = ModelShape(
    "qwen3", hidden=1024, num_layers=28, vocab=151_936, num_heads=16, num_kv_heads=8, head_dim=128, dense_width=3072
)
SHAPE = RunShape(MODEL, BatchShape(65_536))


def total(shape: RunShape, policy: object) -> int:
    return sum(entry.num_bytes for entry in entries(shape, policy))


def test_plain_logits_cost_14_bytes_an_element_in_bf16_and_12_in_float32() -> None:
    elements = 65_536 * 151_936
    assert total(SHAPE, OFF) == 14 * elements
    assert total(replace(SHAPE, dtypes=Dtypes(activation="float32")), OFF) == 12 * elements
    in_float32 = next(e for e in entries(SHAPE, OFF) if e.tensor == "log-softmax")
    assert round(in_float32.num_bytes / GiB, 2) == 37.09  # prime-rl's 37.09 GiB


def test_a_caller_that_holds_the_outputs_holds_the_logits_until_the_backward_is_over() -> None:
    elements = 65_536 * 151_936
    dropped, held = (entries(replace(SHAPE, keeps_outputs=keeps), OFF) for keeps in (False, True))
    assert sum(e.num_bytes for e in dropped) == 12 * elements
    (logits,) = set(held) - set(dropped)
    assert (logits.num_bytes, logits.during) == (2 * elements, BLOCK_BACKWARD | {Moment.LOSS})


def test_the_rings_bytes_do_not_follow_tokens_or_vocabulary() -> None:
    def transient(shape: RunShape) -> int:
        outputs = ("hidden gradient", "weight gradient in float32", "hidden gradient in float32")
        return sum(e.num_bytes for e in entries(shape, VocabPolicy("local")) if e.tensor not in outputs)

    base = transient(SHAPE)
    longer = replace(SHAPE, batch=BatchShape(4 * 65_536))
    wider = replace(SHAPE, model=replace(MODEL, vocab=4 * 151_936))
    assert base < 700 * MiB
    assert transient(longer) - base <= 4 * 65_536 * 16  # statistics of a row
    assert transient(wider) <= base  # smaller blocks, the same strip


def test_entries_follow_the_policy() -> None:
    mesh = replace(SHAPE, mesh=MeshShape(world=8, vocab=8))
    for schedule in ("auto", "one_pass", "weights", "activations"):
        small = total(mesh, VocabPolicy(schedule, budget_bytes=64 * MiB))
        assert small < total(mesh, VocabPolicy(schedule, budget_bytes=256 * MiB)), schedule


def test_it_pays_for_large_vocabularies_whose_logits_are_the_peak() -> None:
    machine = MachineShape()
    assert pays(SHAPE, machine).on
    assert not pays(replace(SHAPE, batch=BatchShape(512)), machine).on
    small = pays(replace(SHAPE, model=replace(MODEL, vocab=32_000)), machine)
    assert not small.on
    assert "32,000" in small.why
    middle = pays(replace(SHAPE, model=replace(MODEL, vocab=64_000)), machine)
    assert not middle.on
    assert "steppe compare" in middle.why


@pytest.mark.parametrize(
    "values", [{"schedule": "ring"}, {"tile_tokens": 0}, {"tile_vocab": -1}, {"num_chunks": 0}, {"budget_bytes": 0}]
)
def test_policies_without_a_meaning_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError):
        VocabPolicy(**values)
