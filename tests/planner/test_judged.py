"""A run's steps 1 and 3 are held against its prediction, and differences beyond 5% are warned of in one line."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.flatteners import NAMES
from steppe.planner.predict import predict
from steppe.training.loop import Trainer
from tests.planner.test_measured import Case
from tests.training.toys import toy_run


def told_by(trainer: Trainer, steps: int = 3) -> dict[int, list[str]]:
    found = {}
    for step in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.step()
        found[step] = [str(w.message) for w in caught if "prediction" in str(w.message)]
    return found


def test_a_run_that_is_as_predicted_is_not_warned_of(tmp_path: Path) -> None:
    trainer = Trainer(toy_run(tmp_path, launch={"device_memory": "80GB"}))
    assert trainer.declared is not None
    assert not any(told_by(trainer).values())


def test_a_plain_run_is_predicted_with_its_moments_in_the_type_of_its_weights(tmp_path: Path) -> None:
    """torch's AdamW makes no float32 masters of bfloat16 weights."""
    narrow = {"dtype": "bfloat16"}
    trainer = Trainer(toy_run(tmp_path, launch={"device_memory": "80GB"}, model=narrow, train=narrow))
    assert trainer.declared is not None
    moments = [s for own in trainer.optimizer.state.values() for s in own.values() if s.ndim]
    entries = predict(trainer.declared.shape, trainer.config.flatten).entries
    predicted = sum(e.num_bytes for e in entries if e.owner == "optimizer" and e.tensor != "foreach transient")
    assert predicted == sum(moment.numel() * moment.element_size() for moment in moments)


def test_steps_one_and_three_are_warned_of_in_one_line_each(tmp_path: Path) -> None:
    """A run that was declared eight times as long as it is."""
    trainer = Trainer(toy_run(tmp_path, launch={"device_memory": "80GB"}))
    assert trainer.declared is not None
    shape = trainer.declared.shape
    longer = replace(shape, batch=replace(shape.batch, seq_len=8 * shape.batch.seq_len))
    trainer.declared = replace(trainer.declared, shape=longer)
    told = told_by(trainer)
    assert [len(lines) for lines in told.values()] == [1, 0, 1]
    assert re.match(r"step 1 differs from its prediction: device peak: measured .*, predicted .* \(-\d+%\)", told[1][0])
    assert "vocab peak: measured" in told[3][0]
    assert "\n" not in told[3][0]


def test_without_a_declared_memory_nothing_is_metered(tmp_path: Path) -> None:
    trainer = Trainer(toy_run(tmp_path))
    assert trainer.declared is None
    assert not any(told_by(trainer).values())


def test_being_judged_changes_no_bit(tmp_path: Path) -> None:
    plain, judged = (Trainer(toy_run(tmp_path, launch=launch)) for launch in ({}, {"device_memory": "80GB"}))
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert plain.step().loss == judged.step().loss


@pytest.mark.slow
def test_a_flattened_run_that_is_as_predicted_is_not_warned_of(tmp_path: Path) -> None:
    config = Case("qwen3_moe", on=NAMES).config(tmp_path).replace("launch", device_memory="80GB")
    assert not any(told_by(Trainer(config)).values())
